"""Scale on paper: predictions for replicas of a device under a rate of requests.

device     stage costs: seconds of a pass by its size, and of Python by request and token
load       the load: Poisson arrivals of embeddings and chats
replica    one gateway: its Python, its lane and its batches, by the gateway's own policies
cluster    replicas behind a balancer, the event heap, and a run's predictions
measuring  the stage costs of this machine
checking   the gateway itself under the same load, beside the predictions
tables     predictions as markdown
"""
