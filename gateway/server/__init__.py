"""Changes to Hypercorn's HTTP/1.1, so that no client can harm other clients.

connections  closes abandoned connections, and idle ones if too many are open
http1        refuses ambiguous framing, buffers bodies, and notices when a client disconnects

"""
