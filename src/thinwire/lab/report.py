def write(records, file): pass
