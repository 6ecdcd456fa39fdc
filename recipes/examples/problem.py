def solve(numbers):
    """First sort the list, then put 5 at the end.

    >>> solve([6, 3, 12, 5, 9])
    [3, 5, 6, 9, 12, 5]
    """


assert solve([6, 3, 12, 5, 9]) == [3, 5, 6, 9, 12, 5]
assert solve([9, 9, 2, 9, 10, 10, 10]) == [2, 9, 9, 9, 10, 10, 10, 5]
