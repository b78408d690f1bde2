// Scratch memory of the kernels.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace coneheads {

/// Memory of this size and more comes in huge pages where the system has them: what is read here and there in it would
/// otherwise miss the processor's table of pages each time.
inline constexpr size_t kHuge = size_t(4) << 20;

inline std::align_val_t alignment_of(size_t bytes) { return std::align_val_t(bytes < kHuge ? 64 : 2 << 20); }
inline void* allocate(size_t bytes) {
  void* data = ::operator new(bytes, alignment_of(bytes));
#if defined(__linux__)
  if (bytes >= kHuge) madvise(data, bytes, MADV_HUGEPAGE);  // advice: if it is not taken, nothing is lost
#endif
  return data;
}
inline void release(void* data, size_t bytes) { ::operator delete(data, alignment_of(bytes)); }

/// Freed blocks of memory, a few for each thread, to be used again: new memory comes page by page from the system, which
/// can take longer than what is done with it.
class Blocks {
 public:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };
  static Block take(size_t bytes) {
    for (Block& block : of_this_thread().kept_)
      if (block.data && block.bytes >= bytes && block.bytes <= 2 * bytes + kPage) return std::exchange(block, Block{});
    return {allocate(bytes), bytes};
  }
  static void give(Block block) {
    if (block.bytes <= kLargest) {
      Blocks& blocks = of_this_thread();
      std::swap(block, blocks.kept_[blocks.next_]);
      blocks.next_ = (blocks.next_ + 1) % kCount;
    }
    release(block.data, block.bytes);
  }

 private:
  static constexpr int kCount = 6;
  static constexpr size_t kPage = 1 << 16, kLargest = 2 << 20;
  Block kept_[kCount];
  int next_ = 0;
  static Blocks& of_this_thread() {
    static thread_local Blocks blocks;
    return blocks;
  }
  Blocks() = default;
  ~Blocks() {
    for (Block& block : kept_) release(block.data, block.bytes);
  }
};

/// Memory for n numbers, not initialised.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n) : block_(Blocks::take(sizeof(T) * size_t(std::max<int64_t>(n, 1)))) {}
  Buffer(Buffer&& other) noexcept : block_(std::exchange(other.block_, {})) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Buffer() {
    if (block_.data) Blocks::give(block_);
  }
  T* get() const { return static_cast<T*>(block_.data); }

 private:
  Blocks::Block block_;
};

}  // namespace coneheads
