def solve(numbers):
    """First sort the list, then put 8 at the end.

    >>> solve([10, 7, 10, 4, 11])
    [4, 7, 10, 10, 11, 8]
    """


assert solve([10, 7, 10, 4, 11]) == [4, 7, 10, 10, 11, 8]
assert solve([3, 12, 9, 5, 5]) == [3, 5, 5, 9, 12, 8]
