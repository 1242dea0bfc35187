"""One model split over several processes, the ranks, of which rank 0 serves requests.

calls       converts engine calls to bytes and back; digests results
links       the connections between rank 0 and the other ranks
leading     rank 0's engine, which sends each call to the other ranks too
following   the other ranks, which make rank 0's calls
"""
