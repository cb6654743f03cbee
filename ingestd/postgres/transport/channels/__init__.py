"""How the bytes of a connection are read and written while libpq is idle.

channel.py   what every channel does
plain.py     the socket itself
tls.py       the TLS session that libpq made on it, by the OpenSSL that libpq uses
libpq.py     messages that libpq read, where neither can be (Kerberos)
opening.py   which of them a connection needs
"""
