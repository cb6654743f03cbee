"""Reading and writing the bytes of a connection while libpq is idle.

channel.py   the contract of every channel
plain.py     the socket itself
tls.py       the TLS session that libpq created on it, through the OpenSSL that libpq uses
libpq.py     messages that libpq read, if neither is possible (Kerberos)
choice.py    which of them a connection has
"""
