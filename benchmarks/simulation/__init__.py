"""Scale on paper: what so many replicas of a device would do with so many requests a second.

device     stage costs: seconds of a pass by its size, and of Python by request and token
load       what is asked: Poisson arrivals of embeddings and chats
replica    one gateway: its Python, its lane and its batches, by the gateway's own policies
cluster    replicas behind a balancer, the event heap, and what a run predicts
measuring  the stage costs of this machine
checking   the gateway itself under the same load, beside what was predicted
tables     predictions as markdown
"""
