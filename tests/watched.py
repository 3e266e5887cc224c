"""Memory that is pictured after every store: what a process that is killed at that instant leaves to the next."""


class Watched:
    """A buffer with a picture of the whole table after every store, and every `step` items in long ones."""

    def __init__(self, inner, table, pictures, step):
        self.inner, self.table, self.pictures, self.step = inner, table, pictures, step

    def __setitem__(self, place, value):
        if isinstance(place, slice):
            for cut in range(place.start, place.stop, self.step):
                self.inner[place.start : cut] = value[: cut - place.start]
                self.pictures.append(bytes(self.table))
        self.inner[place] = value
        self.pictures.append(bytes(self.table))

    def __getitem__(self, place):
        return self.inner[place]

    def __len__(self):
        return len(self.inner)

    def release(self):
        self.inner.release()
