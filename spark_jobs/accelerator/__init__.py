"""Work that the driver does without a Spark job, by Delta's own classes in its JVM."""
