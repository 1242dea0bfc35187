"""Changes to Hypercorn's HTTP/1.1, so that no client can harm other clients.

connections  limits open connections to the available file descriptors; closes abandoned ones
http1        refuses requests with ambiguous framing, keeps unread bodies from blocking a
             connection, and notices when a client disconnects
"""
