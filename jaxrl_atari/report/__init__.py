"""Reading runs back: figures of merit, statistics, tables, graphs, and HTML reports."""
