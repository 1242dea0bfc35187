"""What Hypercorn needs to serve HTTP/1.1 so that one client's bytes harm no other.

connections  the open connections, of which no more are kept than there are descriptors for
http1        requests whose framing is unambiguous, whose unread bodies block no connection, and
             whose clients are seen to leave
"""
