"""Tables by name, in the catalog of the Spark session."""
