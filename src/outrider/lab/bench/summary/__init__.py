"""The figures that every view of a sweep shows: worked out here, once; views only format them."""
