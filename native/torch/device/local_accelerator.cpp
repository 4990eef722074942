// See local_accelerator.h.
#include "local_accelerator.h"

#include <cstring>
#include <string>
#include <unordered_set>

#ifdef __linux__
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <c10/core/DeviceType.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "device_type.h"

namespace genie {

namespace {

thread_local int remote_backward_depth = 0;

#ifdef __GLIBC__  // uses the dynamic linker's data structures

// Replaces c10::is_privateuse1_backend_registered in torch's libraries; at::getAccelerator() calls it.
bool is_privateuse1_registered_for_backward() { return remote_backward_depth > 0; }

using PredicateFunction = bool (*)();

constexpr const char* REPLACED_SYMBOL_NAME = "_ZN3c1033is_privateuse1_backend_registeredEv";

struct SymbolReplacementCount {
  int replaced_slot_count = 0;
};

bool is_torch_library(const char* path) {
  const char* name = std::strrchr(path, '/');
  name = name ? name + 1 : path;
  return std::strncmp(name, "libtorch", 8) == 0;
}

// Whether the address is in the segment that the dynamic linker made read-only after relocation (RELRO).
bool is_in_relro_segment(const dl_phdr_info& library, uintptr_t address) {
  for (int i = 0; i < library.dlpi_phnum; i++) {
    const auto& segment = library.dlpi_phdr[i];
    if (segment.p_type != PT_GNU_RELRO) continue;
    uintptr_t start = library.dlpi_addr + segment.p_vaddr;
    if (address >= start && address < start + segment.p_memsz) return true;
  }
  return false;
}

bool try_write_relocation_slot(const dl_phdr_info& library, void** slot, void* value) {
  auto address = reinterpret_cast<uintptr_t>(slot);
  if (!is_in_relro_segment(library, address)) {
    *slot = value;
    return true;
  }
  auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* start = reinterpret_cast<void*>(address & ~(page - 1));
  if (mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return false;
  *slot = value;
  mprotect(start, page, PROT_READ);
  return true;
}

struct RelocationTables {
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela)* plt_relocations = nullptr;
  size_t plt_relocations_bytes = 0;
  const ElfW(Rela)* data_relocations = nullptr;
  size_t data_relocations_bytes = 0;
};

// glibc has relocated these addresses already.
RelocationTables find_relocation_tables(const ElfW(Dyn)* entry) {
  RelocationTables found;
  for (; entry->d_tag != DT_NULL; entry++) {
    auto* address = reinterpret_cast<const char*>(entry->d_un.d_ptr);
    if (entry->d_tag == DT_SYMTAB) found.symbols = reinterpret_cast<const ElfW(Sym)*>(address);
    if (entry->d_tag == DT_STRTAB) found.names = address;
    if (entry->d_tag == DT_JMPREL) found.plt_relocations = reinterpret_cast<const ElfW(Rela)*>(address);
    if (entry->d_tag == DT_PLTRELSZ) found.plt_relocations_bytes = entry->d_un.d_val;
    if (entry->d_tag == DT_RELA) found.data_relocations = reinterpret_cast<const ElfW(Rela)*>(address);
    if (entry->d_tag == DT_RELASZ) found.data_relocations_bytes = entry->d_un.d_val;
  }
  return found;
}

int replace_symbol_in_table(const dl_phdr_info& library, const RelocationTables& tables,
                            const ElfW(Rela)* entries, size_t bytes) {
  int replaced = 0;
  for (size_t i = 0; entries && i < bytes / sizeof(ElfW(Rela)); i++) {
    auto symbol = ELF64_R_SYM(entries[i].r_info);
    if (symbol == 0 || std::strcmp(tables.names + tables.symbols[symbol].st_name, REPLACED_SYMBOL_NAME) != 0)
      continue;
    auto* slot = reinterpret_cast<void**>(library.dlpi_addr + entries[i].r_offset);
    replaced += try_write_relocation_slot(
        library, slot,
        reinterpret_cast<void*>(static_cast<PredicateFunction>(&is_privateuse1_registered_for_backward)));
  }
  return replaced;
}

int replace_symbol_in_library(dl_phdr_info* library, size_t, void* data) {
  if (!is_torch_library(library->dlpi_name)) return 0;
  for (int i = 0; i < library->dlpi_phnum; i++) {
    if (library->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    auto* entry = reinterpret_cast<const ElfW(Dyn)*>(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr);
    RelocationTables tables = find_relocation_tables(entry);
    if (!tables.symbols || !tables.names) continue;
    auto& replacement = *static_cast<SymbolReplacementCount*>(data);
    replacement.replaced_slot_count +=
        replace_symbol_in_table(*library, tables, tables.plt_relocations, tables.plt_relocations_bytes);
    replacement.replaced_slot_count +=
        replace_symbol_in_table(*library, tables, tables.data_relocations, tables.data_relocations_bytes);
  }
  return 0;
}

#endif

}  // namespace

bool try_keep_local_torch_accelerator() {
#ifdef __GLIBC__
  SymbolReplacementCount replacement;
  dl_iterate_phdr(&replace_symbol_in_library, &replacement);
  return replacement.replaced_slot_count > 0;
#else
  return false;
#endif
}

void enter_remote_backward() { remote_backward_depth++; }
void leave_remote_backward() { remote_backward_depth--; }

BackwardDeviceKinds find_backward_device_kinds(const std::vector<at::Tensor>& roots) {
  BackwardDeviceKinds devices;
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> next;
  auto visit = [&](torch::autograd::Node* node) {
    if (node && seen.insert(node).second) next.push_back(node);
  };
  for (const at::Tensor& root : roots) visit(torch::autograd::impl::gradient_edge(root).function.get());
  while (!next.empty() && !(devices.uses_remote_device && devices.uses_local_accelerator)) {
    torch::autograd::Node* node = next.back();
    next.pop_back();
    for (uint32_t i = 0; i < node->num_inputs(); i++) {
      auto type = node->input_metadata(i).device().type();
      devices.uses_remote_device |= type == DEVICE_TYPE;
      devices.uses_local_accelerator |=
          type != DEVICE_TYPE && type != c10::DeviceType::CPU && type != c10::DeviceType::Meta;
    }
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return devices;
}

}  // namespace genie
