"""What people look at: the pictures and the page of a run, tables on the console."""
