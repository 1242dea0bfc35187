"""One model split over several processes: rank 0 serves, and the other ranks repeat the calls of
its engine.

calls       converts calls of an engine to bytes and back; digests, to compare results of ranks
links       the connections between rank 0 and the other ranks; notices when a rank is lost
leading     rank 0's engine, which has the other ranks make each call too
following   the other ranks, which make rank 0's calls until rank 0 ends the group
"""
