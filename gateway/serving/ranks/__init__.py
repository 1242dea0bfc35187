"""One model over several processes: rank 0 serves, and the others make its engines' calls too.

calls       a call of an engine ⇄ bytes, and the digest by which ranks notice that they differ
links       the connections between rank 0 and the others; which rank is lost
leading     an engine whose calls the other ranks make too
following   the other ranks: they make rank 0's calls until it ends
"""
