// Preloaded into the fuzzer's worker (fuzz.py): gives each CPU tensor of torch pages of its own, between
// unmapped ones, so that an access beyond either end of its storage is a segmentation fault. Freed pages are
// unmapped and never used again.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <atomic>

extern "C" void __libc_free(void*);

namespace {

constexpr size_t PAGE = 4096;
constexpr size_t ARENA_BYTES = size_t{1} << 40;
constexpr size_t ALLOCATION_BYTES_MAX = size_t{64} << 20;
constexpr size_t LIVE_BYTES_MAX = size_t{512} << 20;
enum Placement { DISABLED = 0, AT_END = 1, AT_BEGIN = 2 };

std::atomic<int> placement{DISABLED};
std::atomic<size_t> live_bytes{0}, next_offset{PAGE};
uintptr_t arena = 0;
uint32_t* page_counts = nullptr;  // of the allocation that begins at this page of the arena
uintptr_t c10_begin = 0, c10_end = 0;

int find_c10(dl_phdr_info* info, size_t, void*) {
  if (!info->dlpi_name || !std::strstr(info->dlpi_name, "libc10.so")) return 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD || !(header.p_flags & PF_X)) continue;
    c10_begin = info->dlpi_addr + header.p_vaddr;
    c10_end = c10_begin + header.p_memsz;
  }
  return 1;
}

void* reserve(size_t bytes, int protection) {
  void* pages = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

void* allocate_between_unmapped_pages(size_t bytes) {
  size_t mapped = (bytes + PAGE - 1) / PAGE * PAGE;
  if (mapped > ALLOCATION_BYTES_MAX || live_bytes + mapped > LIVE_BYTES_MAX) return nullptr;
  size_t offset = next_offset.fetch_add(mapped + PAGE);
  if (offset + mapped + PAGE > ARENA_BYTES) return nullptr;
  char* begin = reinterpret_cast<char*>(arena + offset);
  if (mprotect(begin, mapped, PROT_READ | PROT_WRITE) != 0) return nullptr;
  page_counts[offset / PAGE] = static_cast<uint32_t>(mapped / PAGE);
  live_bytes += mapped;
  return placement == AT_END ? begin + mapped - bytes : begin;
}

void unmap(uintptr_t address) {
  size_t first_page = (address - arena) / PAGE, bytes = page_counts[first_page] * PAGE;
  mmap(reinterpret_cast<void*>(arena + first_page * PAGE), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  live_bytes -= bytes;
}

}  // namespace

// 0: ordinary memory; 1: storages end at an unmapped page; 2: storages begin at one. False if not possible.
extern "C" bool guard_set_placement(int value) {
  if (!arena) {
    dl_iterate_phdr(find_c10, nullptr);
    page_counts =
        static_cast<uint32_t*>(reserve(ARENA_BYTES / PAGE * sizeof(uint32_t), PROT_READ | PROT_WRITE));
    arena = reinterpret_cast<uintptr_t>(reserve(ARENA_BYTES, PROT_NONE));
  }
  placement = value;
  return arena && page_counts && c10_end;
}

extern "C" int posix_memalign(void** result, size_t alignment, size_t bytes) {
  auto caller = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  if (placement != DISABLED && caller >= c10_begin && caller < c10_end && bytes) {
    *result = allocate_between_unmapped_pages(bytes);
    return *result ? 0 : ENOMEM;
  }
  using Function = int (*)(void**, size_t, size_t);
  static auto next = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "posix_memalign"));
  return next(result, alignment, bytes);
}

extern "C" void free(void* memory) {
  auto address = reinterpret_cast<uintptr_t>(memory);
  if (arena && address >= arena && address < arena + ARENA_BYTES) {
    unmap(address);
  } else {
    __libc_free(memory);
  }
}
