"""Small functions about lists, mappings, files and graphs that people ask for first, each with its sentence. They are training text."""

import json
import random
from collections import deque
from pathlib import Path


def remove_duplicates(items):
    """Remove duplicates from a list and keep the order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


def reverse_list(items):
    """Reverse a list."""
    return items[::-1]


def flatten(items):
    """Flatten a nested list."""
    result = []
    for item in items:
        if isinstance(item, list):
            result.extend(flatten(item))
        else:
            result.append(item)
    return result


def chunk(items, size):
    """Split a list into chunks of a given size."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def rotate(items, steps):
    """Rotate a list to the left by a number of steps."""
    steps %= len(items)
    return items[steps:] + items[:steps]


def transpose(matrix):
    """Transpose a matrix."""
    return [list(row) for row in zip(*matrix, strict=True)]


def matrix_multiply(a, b):
    """Multiply two matrices."""
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def dot_product(a, b):
    """Compute the dot product of two vectors."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def binary_search(items, target):
    """Find the index of a value in a sorted list with binary search."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def linear_search(items, target):
    """Find the index of a value in a list."""
    for i, item in enumerate(items):
        if item == target:
            return i
    return -1


def bubble_sort(items):
    """Sort a list with bubble sort."""
    items = list(items)
    for i in range(len(items)):
        for j in range(len(items) - 1 - i):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
    return items


def insertion_sort(items):
    """Sort a list with insertion sort."""
    items = list(items)
    for i in range(1, len(items)):
        value = items[i]
        j = i - 1
        while j >= 0 and items[j] > value:
            items[j + 1] = items[j]
            j -= 1
        items[j + 1] = value
    return items


def quicksort(items):
    """Sort a list with quicksort."""
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    left = [x for x in items if x < pivot]
    middle = [x for x in items if x == pivot]
    right = [x for x in items if x > pivot]
    return quicksort(left) + middle + quicksort(right)


def merge_sort(items):
    """Sort a list with merge sort."""
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    return merge(merge_sort(items[:middle]), merge_sort(items[middle:]))


def merge(a, b):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] <= b[j]:
            result.append(a[i])
            i += 1
        else:
            result.append(b[j])
            j += 1
    return result + a[i:] + b[j:]


def read_lines(path):
    """Read a file and return its lines."""
    with open(path, encoding="utf-8") as file:
        return file.read().splitlines()


def count_lines(path):
    """Count the lines in a file."""
    with open(path, encoding="utf-8") as file:
        return sum(1 for _ in file)


def load_json(path):
    """Load a JSON file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def save_json(data, path):
    """Write data to a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=2)


def python_files(folder):
    """List all Python files in a folder."""
    return sorted(Path(folder).glob("**/*.py"))


def merge_dicts(a, b):
    """Merge two dictionaries."""
    return {**a, **b}


def invert_dict(mapping):
    """Swap the keys and values of a dictionary."""
    return {value: key for key, value in mapping.items()}


def sort_by_value(mapping):
    """Sort a dictionary by its values."""
    return dict(sorted(mapping.items(), key=lambda item: item[1]))


def group_by_length(words):
    """Group words by their length."""
    groups = {}
    for word in words:
        groups.setdefault(len(word), []).append(word)
    return groups


def common_elements(a, b):
    """Return the elements that two lists share."""
    return [item for item in a if item in set(b)]


def random_password(length):
    """Generate a random password."""
    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    return "".join(random.choice(characters) for _ in range(length))


def balanced_parentheses(text):
    """Check whether the parentheses of a string are balanced."""
    depth = 0
    for c in text:
        if c == "(":
            depth += 1
        elif c == ")":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def breadth_first_search(graph, start):
    """Visit the nodes of a graph with breadth-first search."""
    seen = {start}
    order = []
    queue = deque([start])
    while queue:
        node = queue.popleft()
        order.append(node)
        for neighbour in graph[node]:
            if neighbour not in seen:
                seen.add(neighbour)
                queue.append(neighbour)
    return order


def hello():
    """Print hello world."""
    print("Hello, world!")
