"""What people look at: figures, the report page, the console."""
