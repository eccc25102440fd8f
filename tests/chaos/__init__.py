"""Real peers of a real run, to which a seeded script does what machines do: die, stop, come back, lose the network.

plan.py       what is done, and when: from one integer (pure)
peers.py      the processes
watcher.py    a process that looks at the mesh as one of its members, and writes down what it sees
storm.py      a plan done to a run, with a log of events
trial.py      a run under a storm, and the verdict
records.py    what the run has left on disk, read by code of its own
checks.py     what must be true at the end
parted.py     peers in several network namespaces, whose link is cut and healed
"""
