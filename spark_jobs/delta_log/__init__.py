"""Delta's log and files, as Spark and the driver read and write them."""
