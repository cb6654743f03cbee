"""Messages of the frontend/backend protocol, as every COPY sends them."""
