"""The memories of a GPU. They find accesses that a GPU would take for errors, and races, which it would not notice."""

from __future__ import annotations

import numpy as np
import torch

BEGIN = 1 << 33  # of global memory: no address fits 32 bits
APART = 512  # bytes between tensors, which nobody may touch
UNWRITTEN = 0xFF  # NaN in every dtype
NOBODY, SEVERAL = -1, -2


class Fault(Exception):
    """An access that is wrong."""


def _aligned(addresses: np.ndarray, size: int) -> None:
    if (addresses % size).any():
        raise Fault(f"an address is not a multiple of {size}: {addresses[addresses % size != 0][0]:#x}")


class Global:
    """Copies of tensors, far from each other."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.places: dict[int, int] = {}
        self.storages: list[tuple[torch.UntypedStorage, int]] = []
        end = APART
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.places:
                self.places[storage.data_ptr()] = end
                self.storages.append((storage, end))
                end += -(-storage.nbytes() // APART) * APART + APART
        self.bytes = np.full(end, UNWRITTEN, np.uint8)
        self.inside = np.zeros(end, bool)
        self.writer, self.reader = (np.full(end, NOBODY, np.int32) for _ in range(2))
        for storage, place in self.storages:
            self.bytes[place : place + storage.nbytes()] = _bytes_of(storage)
            self.inside[place : place + storage.nbytes()] = True

    def address(self, tensor: torch.Tensor) -> int:
        place = self.places[tensor.untyped_storage().data_ptr()]
        return BEGIN + place + tensor.storage_offset() * tensor.element_size()

    def write_back(self) -> None:
        """Into the tensors."""
        for storage, place in self.storages:
            _bytes_of(storage)[:] = self.bytes[place : place + storage.nbytes()]

    def _places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        _aligned(addresses, size)
        places = addresses.astype(np.int64) - BEGIN
        wrong = (places < 0) | (places + size > self.bytes.size)
        if not wrong.any():
            wrong = ~(self.inside[places] & self.inside[places + size - 1])
        if wrong.any():
            raise Fault(f"an address is in no tensor: {addresses[wrong][0]:#x}, of {size} bytes")
        return places

    def read(self, programs: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """uint8 [threads, size]."""
        places = self._places(addresses, size)[:, None] + np.arange(size)
        owner = programs[:, None].astype(np.int32)
        writer = self.writer[places]
        if ((writer != NOBODY) & (writer != owner)).any():
            raise Fault("a program reads what another has written")
        before = self.reader[places]
        mixed = (before != NOBODY) & (before != owner)
        self.reader[places] = np.where(mixed, SEVERAL, owner)
        others = places[self.reader[places] != np.where(mixed, SEVERAL, owner)]  # several programs in this instruction
        self.reader[others] = SEVERAL
        return self.bytes[places]

    def write(self, programs: np.ndarray, addresses: np.ndarray, data: np.ndarray) -> None:
        places = self._places(addresses, data.shape[1])[:, None] + np.arange(data.shape[1])
        owner = programs[:, None].astype(np.int32)
        for others, what in ((self.writer[places], "written"), (self.reader[places], "read")):
            if ((others != NOBODY) & (others != owner)).any():
                raise Fault(f"a program writes what another has {what}")
        self.writer[places] = owner
        self.bytes[places] = data
        if (self.bytes[places] != data).any() or (self.writer[places] != owner).any():
            raise Fault("two threads write different numbers to one place")


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.tensor([], dtype=torch.uint8).set_(storage).numpy()


class Shared:
    """That of all programs, one after the other. Between two barriers, a warp may not read what another has written,
    nor write what another has read or written: on a GPU nobody knows which comes first."""

    def __init__(self, programs: int, size: int) -> None:
        self.size = -(-size // 1024) * 1024
        total = programs * self.size
        self.limit = size
        self.bytes = np.full(total, UNWRITTEN, np.uint8)
        self.epoch = np.zeros(programs, np.int32)  # barriers so far
        self.writer, self.reader = (np.full(total, NOBODY, np.int16) for _ in range(2))
        self.written_at, self.read_at = (np.full(total, -1, np.int32) for _ in range(2))
        self.in_flight = np.zeros(total, bool)  # a copy to here was begun and is not known to be done
        self.being_read = np.zeros(total, np.int16)  # by products that were begun and are not known to be done

    def _places(self, programs: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        _aligned(addresses, size)
        addresses = addresses.astype(np.int64)
        if (addresses + size > self.limit).any():
            raise Fault(f"beyond shared memory, which has {self.limit} bytes: {addresses.max()}, of {size} bytes")
        return (programs * self.size + addresses)[:, None] + np.arange(size)

    def read(self, programs: np.ndarray, warps: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        places = self._places(programs, addresses, size)
        self.note_read(places, programs[:, None], warps[:, None])
        return self.bytes[places]

    def read_together(self, programs: np.ndarray, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """For all warps of a program; and where it is."""
        places = self._places(programs, addresses, size)
        self.note_read(places, programs[:, None], np.int16(SEVERAL))
        return self.bytes[places], places

    def note_read(self, places: np.ndarray, programs: np.ndarray, warps: np.ndarray) -> None:
        epoch = self.epoch[programs]
        if self.in_flight[places].any():
            raise Fault("shared memory is read to which a copy is still under way")
        if ((self.written_at[places] == epoch) & (self.writer[places] != warps)).any():
            raise Fault("shared memory is read that another warp has written since the last barrier")
        again = (self.read_at[places] == epoch) & (self.reader[places] != warps)
        self.reader[places] = np.where(again, SEVERAL, warps)
        first = places.reshape(-1)
        self.read_at[places] = epoch
        # Of several warps in this instruction, the last one stands in `reader` now.
        differs = self.reader[places] != np.where(again, SEVERAL, warps)
        if differs.any():
            self.reader[first[differs.reshape(-1)]] = SEVERAL

    def write(
        self,
        programs: np.ndarray,
        warps: np.ndarray,
        addresses: np.ndarray,
        data: np.ndarray,
    ) -> None:
        places = self._places(programs, addresses, data.shape[1])
        if self.in_flight[places].any():
            raise Fault("shared memory is written to which a copy is still under way")
        self._note_write(places, programs[:, None], warps[:, None])
        self.bytes[places] = data
        if (self.bytes[places] != data).any():
            raise Fault("two threads write different numbers to one place of shared memory")

    def _note_write(self, places: np.ndarray, programs: np.ndarray, warps: np.ndarray) -> None:
        if self.being_read[places].any():
            raise Fault("shared memory is written from which a product is still read")
        epoch = self.epoch[programs]
        for done_at, by, what in ((self.read_at, self.reader, "read"), (self.written_at, self.writer, "written")):
            if ((done_at[places] == epoch) & (by[places] != warps)).any():
                raise Fault(f"shared memory is written that another warp has {what} since the last barrier")
        self.writer[places], self.written_at[places] = warps, epoch

    def begin_copy(self, programs: np.ndarray, warps: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """The places of a copy that goes on by itself."""
        places = self._places(programs, addresses, size)
        self._note_write(places, programs[:, None], warps[:, None])
        if self.in_flight[places].any():
            raise Fault("shared memory is copied to while another copy to it is under way")
        self.in_flight[places] = True
        return places

    def end_copy(self, places: np.ndarray, programs: np.ndarray, warps: np.ndarray, data: np.ndarray) -> None:
        """The thread that began it knows that it is done, and no other."""
        self.in_flight[places] = False
        self.bytes[places] = data
        self.writer[places], self.written_at[places] = warps[:, None], self.epoch[programs][:, None]


class TensorMemory:
    """That of all programs: 128 rows of 512 numbers."""

    ROWS, COLUMNS = 128, 512

    def __init__(self, programs: int) -> None:
        self.shape = (programs, self.ROWS, self.COLUMNS)
        self.words = np.zeros(0, np.uint32)
        self.columns = np.zeros(programs, np.int64)  # that a program has asked for
        self.being_written, self.being_read = (np.zeros(0, np.int16) for _ in range(2))

    def allocate(self, program: int, columns: int) -> int:
        """The first of so many columns more."""
        if not self.words.size:
            self.words = np.full(self.shape, 0xFFFFFFFF, np.uint32)
            self.being_written, self.being_read = (np.zeros(self.shape, np.int16) for _ in range(2))
        if self.columns[program] + columns > self.COLUMNS:
            raise Fault(f"more than {self.COLUMNS} columns of tensor memory")
        self.columns[program] += columns
        return int(self.columns[program] - columns)

    def check(self, programs: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
        if (rows < 0).any() or (rows >= self.ROWS).any() or (columns >= self.columns[programs]).any():
            raise Fault("beyond tensor memory")
