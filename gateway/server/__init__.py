"""What Hypercorn needs to serve HTTP/1.1 so that one client's bytes harm no other.

connections  the open connections, of which no more are kept than there are descriptors for
http1        requests whose framing is unambiguous, and whose clients are seen to leave
bodies       the part of a body that has arrived and that its app has not read
"""
