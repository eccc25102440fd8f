from mesh.version import Ballot, Lineage, Version

A, B, C = Ballot(1, "a"), Ballot(2, "b"), Ballot(3, "c")
LINEAGE = Lineage(((A, 2), (B, 5), (C, 5)))


def test_a_number_names_one_version_of_a_lineage_the_oldest_where_terms_share_it():
    versions = {number: LINEAGE.at(number) for number in range(1, 8)}
    assert versions == {
        1: Version(A, 2),
        2: Version(A, 2),
        3: Version(A, 3),
        4: Version(A, 4),
        5: Version(A, 5),
        6: Version(C, 6),
        7: Version(C, 7),
    }
    assert all(LINEAGE.holds(v) for v in versions.values())
