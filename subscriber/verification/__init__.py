"""Compare the rows of two snapshots, table by table, without reading equal rows into this process."""
