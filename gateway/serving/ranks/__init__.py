"""One model split over several processes, the ranks: rank 0 serves requests, and the other ranks
repeat each call of rank 0's engine.

calls       converts calls of an engine to bytes and back; digests, to compare ranks' results
links       the connections between rank 0 and the other ranks; notices when a rank is lost
leading     rank 0's engine, which sends each call to the other ranks too
following   the other ranks, which make rank 0's calls until rank 0 ends the group
"""
