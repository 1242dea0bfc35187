"""Changes to Hypercorn, so that one client's bytes harm no other client of HTTP/1.1.

connections  the open connections, no more than there are descriptors for
http1        requests whose framing is unambiguous, whose unread bodies block no connection, and
             whose clients are seen to leave
"""
