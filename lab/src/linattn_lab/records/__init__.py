"""Files of measurements: rows that survive an early end, and the JSON Schema of what is written."""
