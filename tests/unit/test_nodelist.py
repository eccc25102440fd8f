import pytest

from mesh import nodelist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("node-[08-11]", ["node-08", "node-09", "node-10", "node-11"]),
        ("n[1-2]x,login", ["n1x", "n2x", "login"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("a[099-101],b[1],c.example.org", ["a099", "a100", "a101", "b1", "c.example.org"]),
        ("[::1]", ["[::1]"]),
    ],
)
def test_lists_are_expanded(text, hosts):
    assert [host for part in nodelist.split(text) for host in nodelist.expand(part)] == hosts


@pytest.mark.parametrize("text", ["n[3-1]", "n[1-]", "n[1-2-3]", "n[1,,2]", "n[1-999999999]", "n[1-300]m[1-300]"])
def test_what_is_no_list_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"range of hosts|more than"):
        nodelist.expand(text)
