// File trees for the grid's sync: walks, reads, stages, places and checks many small files.
//
// genie/grid/remote/tree.py defines the format, has a Python implementation of every function, and calls
// these through ctypes, on this machine and on nodes. Therefore: a C interface, C++17, linked only to the C
// library. A property test checks that both are equivalent. Does not decide what is sent or deleted.
//
// A record: RecordHeader, path, link target, FileStamp. Records are in walk order: a directory, then its
// contents. Symbolic links are never followed: every directory is opened from its parent.

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#ifdef __APPLE__
#define st_mtim st_mtimespec
#define st_ctim st_ctimespec
#endif

namespace genie {
namespace {

constexpr int kDepthMax = 256;
constexpr int kPathMax = 4096;
constexpr uint64_t kNoOffset = ~uint64_t{0};
constexpr int64_t kSecondNs = 1000000000;
// File times have a resolution of 1 to 10 ms; some file systems store whole seconds only.
constexpr int64_t kClockTickNs = 20000000;
constexpr int64_t kSmallFileBytesMax = 256 << 10;
constexpr int64_t kSparseFileBytesMin = 64 << 10;

struct RecordHeader {
  uint8_t kind;   // 'd', 'f', 'l', 'x' for excluded, 'r' for removed
  uint8_t flags;  // of 'x': 1 for a directory
  uint16_t mode;
  uint16_t path_bytes;
  uint16_t link_bytes;
  uint64_t size;
  int64_t mtime_ns;
  uint8_t sha256[32];
};
static_assert(sizeof(RecordHeader) == 56);

// Identifies an unchanged file. All zero: unknown.
struct FileStamp {
  uint64_t inode;
  int64_t mtime_ns;
  int64_t ctime_ns;
};
static_assert(sizeof(FileStamp) == 24);

// A whole small file in transfer; its bytes follow.
struct FileFrameHeader {
  uint8_t kind;
  uint8_t pad;
  uint16_t mode;
  uint32_t number;
  uint64_t size;
  int64_t mtime_ns;
  uint8_t sha256[32];
};
static_assert(sizeof(FileFrameHeader) == 56);

struct TreeRecord {
  RecordHeader header;
  const uint8_t* at;

  explicit TreeRecord(const uint8_t* from) : at(from) { memcpy(&header, from, sizeof header); }
  const char* path() const { return reinterpret_cast<const char*>(at + sizeof(RecordHeader)); }
  const uint8_t* link() const { return at + sizeof(RecordHeader) + header.path_bytes; }
  uint64_t bytes_without_stamp() const {
    return sizeof(RecordHeader) + header.path_bytes + header.link_bytes;
  }
  uint64_t bytes() const { return bytes_without_stamp() + sizeof(FileStamp); }
  FileStamp stamp() const {
    FileStamp found;
    memcpy(&found, at + bytes_without_stamp(), sizeof found);
    return found;
  }
  bool is_folder() const { return header.kind == 'd' || (header.kind == 'x' && header.flags != 0); }
};

// Sorts '/' before every other byte, so that the contents of a directory directly follow it.
int compare_paths(const char* a, size_t a_bytes, const char* b, size_t b_bytes) {
  const size_t common = std::min(a_bytes, b_bytes);
  for (size_t i = 0; i < common; ++i) {
    if (a[i] != b[i]) {
      const int left = a[i] == '/' ? 0 : static_cast<uint8_t>(a[i]);
      const int right = b[i] == '/' ? 0 : static_cast<uint8_t>(b[i]);
      return left - right;
    }
  }
  return a_bytes == b_bytes ? 0 : a_bytes < b_bytes ? -1 : 1;
}

int compare_record_paths(const TreeRecord& a, const TreeRecord& b) {
  return compare_paths(a.path(), a.header.path_bytes, b.path(), b.header.path_bytes);
}

timespec to_timespec(int64_t nanoseconds) {
  const int64_t rest = (nanoseconds % kSecondNs + kSecondNs) % kSecondNs;
  timespec time = {};
  time.tv_sec = (nanoseconds - rest) / kSecondNs;
  time.tv_nsec = rest;
  return time;
}

int64_t to_nanoseconds(const timespec& time) { return time.tv_sec * kSecondNs + time.tv_nsec; }

FileStamp stamp_from_stat(const struct stat& found) {
  return {static_cast<uint64_t>(found.st_ino), to_nanoseconds(found.st_mtim), to_nanoseconds(found.st_ctim)};
}

bool is_same_stamp(const FileStamp& a, const FileStamp& b) {
  return a.inode == b.inode && a.mtime_ns == b.mtime_ns && a.ctime_ns == b.ctime_ns;
}

// True if the file was written so shortly before the scan that a later write may have the same times.
bool is_too_recent_to_trust(const FileStamp& stamp, int64_t taken_ns) {
  const bool whole = stamp.mtime_ns % kSecondNs == 0 && stamp.ctime_ns % kSecondNs == 0;
  return std::max(stamp.mtime_ns, stamp.ctime_ns) + (whole ? 2 * kSecondNs : kClockTickNs) >= taken_ns;
}

struct ByteBuffer {
  uint8_t* data = nullptr;
  uint64_t size = 0;
  uint64_t capacity = 0;

  uint8_t* grow(uint64_t more) {
    if (size + more > capacity) {
      capacity = std::max(capacity * 2, size + more + 4096);
      data = static_cast<uint8_t*>(realloc(data, capacity));
      if (data == nullptr) abort();
    }
    size += more;
    return data + size - more;
  }
  void add(const void* from, uint64_t bytes) {
    if (bytes != 0) memcpy(grow(bytes), from, bytes);
  }
  void add_number(uint64_t number) { add(&number, sizeof number); }
};

}  // namespace

// Output of every function; the caller passes it to genie_free_output().
struct CallOutput {
  uint8_t* data;
  uint64_t size;
  uint64_t* numbers;
  uint64_t count;
  uint64_t skipped_count;
  int32_t is_same_as_old;
  int32_t gitignore_changed;
  int32_t error;  // an errno, or -1 if the IsExcludedFunction callback failed
  char error_path[kPathMax + 8];
};

namespace {

int set_error(CallOutput* out, int error, const char* path, size_t bytes) {
  out->error = error;
  const size_t length = std::min(bytes, sizeof out->error_path - 1);
  if (length != 0) memcpy(out->error_path, path, length);
  out->error_path[length] = 0;
  return -1;
}

void set_output(CallOutput* out, const ByteBuffer& data, const ByteBuffer& list) {
  out->data = data.data;
  out->size = data.size;
  out->numbers = reinterpret_cast<uint64_t*>(list.data);
  out->count = list.size / sizeof(uint64_t);
}

// Opens the directory of a path, step by step from the root. Consecutive paths share open directories.
class OpenDirectories {
 public:
  explicit OpenDirectories(int root) { fds_[0] = root; }
  ~OpenDirectories() { close_below(0); }
  OpenDirectories(const OpenDirectories&) = delete;
  OpenDirectories& operator=(const OpenDirectories&) = delete;

  // Returns the parent directory of `path` and sets `name`; -1 with errno.
  int open_parent(const char* path, size_t bytes, const char** name) {
    if (bytes == 0 || bytes >= kPathMax) return return_errno(ENAMETOOLONG);
    memcpy(wanted_path_, path, bytes);
    wanted_path_[bytes] = 0;
    if (memchr(wanted_path_, 0, bytes) != nullptr) return return_errno(EINVAL);
    const char* slash = strrchr(wanted_path_, '/');
    const size_t folder_bytes = slash == nullptr ? 0 : static_cast<size_t>(slash - wanted_path_);
    *name = slash == nullptr ? wanted_path_ : slash + 1;
    if (!is_plain_name(*name)) return return_errno(EINVAL);
    while (depth_ > 0 && !is_within(folder_bytes)) close_below(depth_ - 1);
    while (path_ends_[depth_] < folder_bytes) {
      if (open_next_component(folder_bytes) < 0) return -1;
    }
    return fds_[depth_];
  }

 private:
  static int return_errno(int error) {
    errno = error;
    return -1;
  }
  static bool is_plain_name(const char* name) {
    return *name != 0 && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
  }
  bool is_within(size_t folder_bytes) const {
    const size_t end = path_ends_[depth_];
    return end <= folder_bytes && memcmp(open_path_, wanted_path_, end) == 0 &&
           (end == folder_bytes || wanted_path_[end] == '/');
  }
  int open_next_component(size_t folder_bytes) {
    if (depth_ + 1 >= kDepthMax) return return_errno(ENAMETOOLONG);
    const size_t begin = path_ends_[depth_] == 0 ? 0 : path_ends_[depth_] + 1;
    const void* slash = memchr(wanted_path_ + begin, '/', folder_bytes - begin);
    const size_t end =
        slash == nullptr ? folder_bytes : static_cast<size_t>(static_cast<const char*>(slash) - wanted_path_);
    char name[kPathMax];
    memcpy(name, wanted_path_ + begin, end - begin);
    name[end - begin] = 0;
    if (!is_plain_name(name)) return return_errno(EINVAL);
    const int fd = openat(fds_[depth_], name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return -1;
    memcpy(open_path_, wanted_path_, end);
    fds_[++depth_] = fd;
    path_ends_[depth_] = end;
    return 0;
  }
  void close_below(int depth) {
    while (depth_ > depth) close(fds_[depth_--]);
  }

  int fds_[kDepthMax];
  size_t path_ends_[kDepthMax] = {0};
  int depth_ = 0;
  char open_path_[kPathMax];
  char wanted_path_[kPathMax];
};

using IsExcludedFunction = int32_t (*)(const char* path, uint64_t bytes, int32_t is_folder);

struct DirectoryEntry {
  uint64_t name_offset;
  uint8_t type;
};

class TreeWalker {
 public:
  TreeWalker(const uint8_t* old, uint64_t old_bytes, int64_t old_taken_ns, bool reuse,
             IsExcludedFunction is_excluded, CallOutput* out)
      : next_old_record_(old),
        old_end_(old + old_bytes),
        old_taken_ns_(old_taken_ns),
        reuse_exclusions_(reuse),
        is_excluded_function_(is_excluded),
        output_(out) {}

  int run(const char* root) {
    const int fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return set_error(output_, errno, "", 0);
    const uint8_t* old = next_old_record_;
    const uint64_t old_bytes = static_cast<uint64_t>(old_end_ - next_old_record_);
    int status = walk_directory(fd, 0, 0);
    while (status == 0 && next_old_record_ < old_end_) skip_old_record();
    output_->is_same_as_old = status == 0 && unknown_content_offsets_.size == 0 &&
                              records_.size == old_bytes &&
                              (old_bytes == 0 || memcmp(records_.data, old, old_bytes) == 0);
    set_output(output_, records_, unknown_content_offsets_);
    return status;
  }

 private:
  // Takes ownership of the descriptor. path_ starts with the path of the directory.
  int walk_directory(int fd, size_t path_bytes, int depth) {
    DIR* dir = fdopendir(fd);
    if (dir == nullptr) {
      const int error = errno;
      close(fd);
      return set_error(output_, error, path_, path_bytes);
    }
    ByteBuffer text, names;
    const int error = list_directory(dir, depth, &text, &names);
    DirectoryEntry* first = reinterpret_cast<DirectoryEntry*>(names.data);
    const uint64_t count = names.size / sizeof(DirectoryEntry);
    const char* base = reinterpret_cast<const char*>(text.data);
    std::sort(first, first + count, [base](const DirectoryEntry& a, const DirectoryEntry& b) {
      return strcmp(base + a.name_offset, base + b.name_offset) < 0;
    });
    int status = error == 0 ? 0 : set_error(output_, error, path_, path_bytes);
    for (uint64_t i = 0; status == 0 && i < count; ++i) {
      status = add_entry(fd, base + first[i].name_offset, first[i].type, path_bytes, depth);
    }
    closedir(dir);
    free(text.data);
    free(names.data);
    return status;
  }

  static int list_directory(DIR* dir, int depth, ByteBuffer* text, ByteBuffer* names) {
    for (;;) {
      errno = 0;
      const dirent* found = readdir(dir);
      if (found == nullptr) return errno;
      const char* name = found->d_name;
      if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) continue;
      if (depth == 0 && (strcmp(name, ".grid") == 0 || strcmp(name, "grid_env") == 0)) continue;
      const DirectoryEntry entry = {text->size, found->d_type};
      text->add(name, strlen(name) + 1);
      names->add(&entry, sizeof entry);
    }
  }

  int add_entry(int fd, const char* name, uint8_t type, size_t folder_bytes, int depth) {
    const size_t begin = folder_bytes == 0 ? 0 : folder_bytes + 1;
    const size_t name_bytes = strlen(name);
    if (begin + name_bytes >= kPathMax || depth + 1 >= kDepthMax) {
      return set_error(output_, ENAMETOOLONG, path_, folder_bytes);
    }
    if (folder_bytes != 0) path_[folder_bytes] = '/';
    memcpy(path_ + begin, name, name_bytes + 1);
    const size_t bytes = begin + name_bytes;
    struct stat found;
    bool have_stat = false;
    if (type == DT_UNKNOWN) {
      if (fstatat(fd, name, &found, AT_SYMLINK_NOFOLLOW) < 0) return ignore_if_removed(bytes);
      have_stat = true;
      type = IFTODT(found.st_mode);
    }
    if (type != DT_DIR && type != DT_REG && type != DT_LNK) {
      ++output_->skipped_count;
      return 0;
    }
    const uint8_t* old = find_old_record(bytes);
    const bool is_gitignore = type == DT_REG && strcmp(name, ".gitignore") == 0;
    if (old != nullptr && !is_gitignore && was_gitignore_file(TreeRecord(old)))
      output_->gitignore_changed = 1;
    const int excluded = is_excluded(old, bytes, type == DT_DIR);
    if (excluded < 0) return set_error(output_, -1, path_, bytes);
    if (!excluded || is_gitignore) {
      if (!have_stat && fstatat(fd, name, &found, AT_SYMLINK_NOFOLLOW) < 0) return ignore_if_removed(bytes);
      if (IFTODT(found.st_mode) != type) return 0;  // just replaced: the next walk finds it
    }
    if (is_gitignore && !(old != nullptr && is_same_stamp(TreeRecord(old).stamp(), stamp_from_stat(found))))
      output_->gitignore_changed = 1;
    if (excluded) return add_excluded(bytes, type == DT_DIR, is_gitignore ? &found : nullptr);
    if (type == DT_REG) return add_file(old, bytes, found);
    if (type == DT_LNK) return add_link(fd, name, bytes, found);
    return add_folder(fd, name, bytes, found, depth);
  }

  // Ignores a file that has been removed since it was listed.
  int ignore_if_removed(size_t bytes) {
    return errno == ENOENT ? 0 : set_error(output_, errno, path_, bytes);
  }

  int is_excluded(const uint8_t* old, size_t bytes, bool is_folder) {
    if (reuse_exclusions_ && old != nullptr) {
      const TreeRecord known(old);
      if (known.is_folder() == is_folder) return known.header.kind == 'x';
    }
    return is_excluded_function_(path_, bytes, is_folder);
  }

  int add_excluded(size_t bytes, bool is_folder, const struct stat* found) {
    RecordHeader header = {};
    header.kind = 'x';
    header.flags = is_folder;
    append_record(header, bytes, nullptr, found == nullptr ? FileStamp{} : stamp_from_stat(*found));
    return 0;
  }

  int add_file(const uint8_t* old, size_t bytes, const struct stat& found) {
    const FileStamp stamp = stamp_from_stat(found);
    RecordHeader header = {};
    header.kind = 'f';
    header.mode = found.st_mode & 07777;
    header.size = static_cast<uint64_t>(found.st_size);
    header.mtime_ns = stamp.mtime_ns;
    bool is_clean = false;
    if (old != nullptr) {
      const TreeRecord known(old);
      is_clean = known.header.kind == 'f' && known.header.size == header.size &&
                 is_same_stamp(known.stamp(), stamp) && !is_too_recent_to_trust(stamp, old_taken_ns_);
      if (is_clean) memcpy(header.sha256, known.header.sha256, sizeof header.sha256);
    }
    if (!is_clean) unknown_content_offsets_.add_number(records_.size);
    append_record(header, bytes, nullptr, stamp);
    return 0;
  }

  int add_link(int fd, const char* name, size_t bytes, const struct stat& found) {
    char target[kPathMax];
    const ssize_t count = readlinkat(fd, name, target, sizeof target);
    if (count < 0) return ignore_if_removed(bytes);
    RecordHeader header = {};
    header.kind = 'l';
    header.mode = 0777;
    header.link_bytes = static_cast<uint16_t>(count);
    append_record(header, bytes, target, stamp_from_stat(found));
    return 0;
  }

  int add_folder(int fd, const char* name, size_t bytes, const struct stat& found, int depth) {
    const int inner = openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (inner < 0) return ignore_if_removed(bytes);
    RecordHeader header = {};
    header.kind = 'd';
    header.mode = found.st_mode & 07777;
    append_record(header, bytes, nullptr, FileStamp{});
    return walk_directory(inner, bytes, depth + 1);
  }

  void append_record(RecordHeader header, size_t bytes, const char* link, const FileStamp& stamp) {
    header.path_bytes = static_cast<uint16_t>(bytes);
    records_.add(&header, sizeof header);
    records_.add(path_, bytes);
    if (link != nullptr) records_.add(link, header.link_bytes);
    records_.add(&stamp, sizeof stamp);
  }

  // Returns the old record of path_, or null. Old records are in walk order too.
  const uint8_t* find_old_record(size_t bytes) {
    while (next_old_record_ < old_end_) {
      const TreeRecord next(next_old_record_);
      const int order = compare_paths(next.path(), next.header.path_bytes, path_, bytes);
      if (order > 0) return nullptr;
      if (order == 0) {
        next_old_record_ += next.bytes();
        return next.at;
      }
      skip_old_record();
    }
    return nullptr;
  }

  void skip_old_record() {
    const TreeRecord removed(next_old_record_);
    if (was_gitignore_file(removed)) output_->gitignore_changed = 1;
    next_old_record_ += removed.bytes();
  }

  static bool was_gitignore_file(const TreeRecord& old) {
    static constexpr char kRules[] = ".gitignore";
    constexpr size_t kBytes = sizeof kRules - 1;
    const size_t bytes = old.header.path_bytes;
    const bool is_file = old.header.kind == 'f' || (old.header.kind == 'x' && old.stamp().inode != 0);
    return is_file && bytes >= kBytes && memcmp(old.path() + bytes - kBytes, kRules, kBytes) == 0 &&
           (bytes == kBytes || old.path()[bytes - kBytes - 1] == '/');
  }

  const uint8_t* next_old_record_;
  const uint8_t* old_end_;
  int64_t old_taken_ns_;
  bool reuse_exclusions_;
  IsExcludedFunction is_excluded_function_;
  CallOutput* output_;
  ByteBuffer records_;
  ByteBuffer unknown_content_offsets_;
  char path_[kPathMax];
};

bool try_read_all(int fd, uint8_t* into, uint64_t size) {
  for (uint64_t done = 0; done < size;) {
    const ssize_t count = read(fd, into + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += static_cast<uint64_t>(count);
  }
  return true;
}

bool try_write_all(int fd, const uint8_t* from, uint64_t size) {
  for (uint64_t done = 0; done < size;) {
    const ssize_t count = write(fd, from + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    done += static_cast<uint64_t>(count);
  }
  return true;
}

bool is_as_recorded(const struct stat& found, const TreeRecord& record) {
  return S_ISREG(found.st_mode) && static_cast<uint64_t>(found.st_size) == record.header.size &&
         is_same_stamp(stamp_from_stat(found), record.stamp());
}

bool is_sparse(const struct stat& found) {
  return found.st_size >= kSparseFileBytesMin && found.st_blocks * 512 < found.st_size;
}

// Returns 0 if the file is in the buffer, 1 if it needs the slow path, -1 if the buffer is full.
int read_small_file(OpenDirectories* folders, const TreeRecord& record, uint32_t number, uint8_t* into,
                    uint64_t capacity) {
  if (record.header.size > static_cast<uint64_t>(kSmallFileBytesMax)) return 1;
  if (sizeof(FileFrameHeader) + record.header.size > capacity) return -1;
  const char* name;
  const int parent = folders->open_parent(record.path(), record.header.path_bytes, &name);
  if (parent < 0) return 1;
  const int fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return 1;
  struct stat before, after;
  const bool is_whole = fstat(fd, &before) == 0 && is_as_recorded(before, record) && !is_sparse(before) &&
                        try_read_all(fd, into + sizeof(FileFrameHeader), record.header.size) &&
                        fstat(fd, &after) == 0 && is_as_recorded(after, record);
  close(fd);
  if (!is_whole) return 1;
  FileFrameHeader frame = {};
  frame.kind = 'F';
  frame.mode = record.header.mode;
  frame.number = number;
  frame.size = record.header.size;
  frame.mtime_ns = record.header.mtime_ns;
  memcpy(into, &frame, sizeof frame);
  return 0;
}

void object_name(const uint8_t* sha256, uint64_t size, char* into) {
  static constexpr char kDigits[] = "0123456789abcdef";
  for (int i = 0; i < 32; ++i) {
    *into++ = kDigits[sha256[i] >> 4];
    *into++ = kDigits[sha256[i] & 15];
  }
  snprintf(into, 24, ".%llx", static_cast<unsigned long long>(size));
}

int stage_file(int objects, const FileFrameHeader& frame, const uint8_t* data, const char* name) {
  const int fd =
      openat(objects, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, frame.mode & 0777);
  if (fd < 0) return errno == EEXIST ? 0 : errno;
  const timespec times[2] = {{0, UTIME_OMIT}, to_timespec(frame.mtime_ns)};
  int error = try_write_all(fd, data, frame.size) && futimens(fd, times) == 0 ? 0 : errno;
  if (close(fd) < 0 && error == 0) error = errno;
  if (error != 0) unlinkat(objects, name, 0);
  return error;
}

// Sets mode and time of the staged file; returns 0 or an errno. `is_placed`: the file is already in place.
int prepare_staged_file(int objects, const char* object, int parent, const char* name,
                        const TreeRecord& record, bool* is_placed) {
  struct stat found;
  if (fstatat(objects, object, &found, AT_SYMLINK_NOFOLLOW) < 0) {
    if (errno != ENOENT) return errno;
    *is_placed = fstatat(parent, name, &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(found.st_mode) &&
                 static_cast<uint64_t>(found.st_size) == record.header.size &&
                 to_nanoseconds(found.st_mtim) == record.header.mtime_ns;
    return *is_placed ? 0 : ENOENT;
  }
  if ((found.st_mode & 07777) != record.header.mode && fchmodat(objects, object, record.header.mode, 0) < 0) {
    return errno;
  }
  const int64_t mtime_ns = record.header.mtime_ns;
  const timespec times[2] = {{0, UTIME_OMIT}, to_timespec(mtime_ns)};
  if (to_nanoseconds(found.st_mtim) != mtime_ns &&
      utimensat(objects, object, times, AT_SYMLINK_NOFOLLOW) < 0) {
    return errno;
  }
  return 0;
}

int place_directory(int parent, const char* name) {
  if (mkdirat(parent, name, 0700) == 0) return 0;
  struct stat found;
  if (errno != EEXIST || fstatat(parent, name, &found, AT_SYMLINK_NOFOLLOW) < 0) return errno;
  return S_ISDIR(found.st_mode) ? 0 : ENOTDIR;
}

int place_entry(OpenDirectories* folders, int objects, const TreeRecord& record) {
  const char* name;
  const int parent = folders->open_parent(record.path(), record.header.path_bytes, &name);
  if (parent < 0) return errno;
  if (record.header.kind == 'd') return place_directory(parent, name);
  char object[96];
  object_name(record.header.sha256, record.header.size, object);
  bool is_placed = false;
  const int error = prepare_staged_file(objects, object, parent, name, record, &is_placed);
  if (error != 0 || is_placed) return error;
  return renameat(objects, object, parent, name) == 0 ? 0 : errno;
}

// Whether the file at the record's path is unchanged. `found` is set if a file exists.
bool is_unchanged(OpenDirectories* folders, const TreeRecord& record, int64_t taken_ns, struct stat* found,
                  bool* exists) {
  const char* name;
  const int parent = folders->open_parent(record.path(), record.header.path_bytes, &name);
  *exists = parent >= 0 && fstatat(parent, name, found, AT_SYMLINK_NOFOLLOW) == 0;
  if (!*exists) return false;
  if (record.header.kind == 'd')
    return S_ISDIR(found->st_mode) && (found->st_mode & 07777) == record.header.mode;
  const mode_t kind = record.header.kind == 'f' ? S_IFREG : S_IFLNK;
  if ((found->st_mode & S_IFMT) != kind || !is_same_stamp(record.stamp(), stamp_from_stat(*found)))
    return false;
  if (record.header.kind == 'l') return true;
  return static_cast<uint64_t>(found->st_size) == record.header.size &&
         (found->st_mode & 07777) == record.header.mode && !is_too_recent_to_trust(record.stamp(), taken_ns);
}

// Records come from disks and other machines, so their sizes are validated before use.
bool are_records_complete(const uint8_t* records, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes;) {
    if (bytes - at < sizeof(RecordHeader) + sizeof(FileStamp)) return false;
    const uint64_t size = TreeRecord(records + at).bytes();
    if (size > bytes - at) return false;
    at += size;
  }
  return true;
}

const uint8_t* skip_excluded(const uint8_t* at, const uint8_t* end) {
  while (at < end && TreeRecord(at).header.kind == 'x') at += TreeRecord(at).bytes();
  return at;
}

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

// Returns records of all files in a directory. `numbers` has the offsets of files with unknown contents.
EXPORTED int32_t genie_walk_tree(const char* root, const uint8_t* old, uint64_t old_bytes,
                                 int64_t old_taken_ns, int32_t reuse, IsExcludedFunction is_excluded,
                                 CallOutput* out) {
  if (!are_records_complete(old, old_bytes)) return set_error(out, EBADMSG, "", 0);
  return TreeWalker(old, old_bytes, old_taken_ns, reuse != 0, is_excluded, out).run(root);
}

// Returns frames of the small files at `offsets`, as many as fit. `numbers` has 0 for a file in the buffer
// and 1 for one that needs the slow path; `size` is the number of bytes used.
EXPORTED int32_t genie_read_small_files(int32_t root, const uint8_t* records, const uint64_t* offsets,
                                        uint64_t count, uint32_t first_number, uint8_t* into,
                                        uint64_t capacity, CallOutput* out) {
  OpenDirectories folders(root);
  ByteBuffer list;
  uint64_t used = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const TreeRecord record(records + offsets[i]);
    const uint32_t number = first_number + static_cast<uint32_t>(i);
    const int status = read_small_file(&folders, record, number, into + used, capacity - used);
    if (status < 0) break;
    list.add_number(static_cast<uint64_t>(status));
    if (status == 0) used += sizeof(FileFrameHeader) + record.header.size;
  }
  set_output(out, ByteBuffer{}, list);
  out->size = used;
  return 0;
}

// Writes the complete frames at the beginning of `data`. `size` is the bytes consumed, `count` the frames.
EXPORTED int32_t genie_stage_files(int32_t objects, const uint8_t* data, uint64_t bytes, CallOutput* out) {
  while (bytes - out->size >= sizeof(FileFrameHeader)) {
    FileFrameHeader frame;
    memcpy(&frame, data + out->size, sizeof frame);
    if (frame.kind != 'F' || frame.size > bytes - out->size - sizeof frame) break;
    char name[96];
    object_name(frame.sha256, frame.size, name);
    const int error = stage_file(objects, frame, data + out->size + sizeof frame, name);
    if (error != 0) return set_error(out, error, name, strlen(name));
    out->size += sizeof frame + frame.size;
    ++out->count;
  }
  return 0;
}

// Creates directories and moves staged files to the paths of their records. `size` is the bytes consumed.
EXPORTED int32_t genie_place_entries(int32_t root, int32_t objects, const uint8_t* records, uint64_t bytes,
                                     CallOutput* out) {
  if (!are_records_complete(records, bytes)) return set_error(out, EBADMSG, "", 0);
  OpenDirectories folders(root);
  while (out->size < bytes) {
    const TreeRecord record(records + out->size);
    const int error = place_entry(&folders, objects, record);
    if (error != 0) return set_error(out, error, record.path(), record.header.path_bytes);
    out->size += record.bytes();
  }
  return 0;
}

// `numbers` has the offsets of records that do not match the files. With `fill_stamps`, only missing stamps
// are filled in from the files.
EXPORTED int32_t genie_check_records(int32_t root, uint8_t* records, uint64_t bytes, int64_t taken_ns,
                                     int32_t fill_stamps, CallOutput* out) {
  if (!are_records_complete(records, bytes)) return set_error(out, EBADMSG, "", 0);
  OpenDirectories folders(root);
  ByteBuffer list;
  for (uint64_t at = 0; at < bytes;) {
    const TreeRecord record(records + at);
    const bool is_new = record.header.kind != 'd' && record.stamp().inode == 0;
    struct stat found;
    bool exists = false;
    if (fill_stamps == 0) {
      if (!is_unchanged(&folders, record, taken_ns, &found, &exists)) list.add_number(at);
    } else if (is_new) {
      is_unchanged(&folders, record, taken_ns, &found, &exists);
      const FileStamp stamp = exists ? stamp_from_stat(found) : FileStamp{};
      memcpy(records + at + record.bytes_without_stamp(), &stamp, sizeof stamp);
    }
    at += record.bytes();
  }
  set_output(out, ByteBuffer{}, list);
  return 0;
}

// `numbers` has pairs of offsets, old and new, of records that differ; one of a pair may be kNoOffset.
EXPORTED int32_t genie_compare_records(const uint8_t* old, uint64_t old_bytes, const uint8_t* now,
                                       uint64_t now_bytes, CallOutput* out) {
  if (!are_records_complete(old, old_bytes) || !are_records_complete(now, now_bytes))
    return set_error(out, EBADMSG, "", 0);
  ByteBuffer list;
  const uint8_t *a = old, *b = now, *a_end = old + old_bytes, *b_end = now + now_bytes;
  for (;;) {
    a = skip_excluded(a, a_end);
    b = skip_excluded(b, b_end);
    if (a >= a_end && b >= b_end) break;
    const int order = a >= a_end ? 1 : b >= b_end ? -1 : compare_record_paths(TreeRecord(a), TreeRecord(b));
    const uint64_t a_bytes = order <= 0 ? TreeRecord(a).bytes() : 0;
    const uint64_t b_bytes = order >= 0 ? TreeRecord(b).bytes() : 0;
    const bool is_equal = order == 0 && a_bytes == b_bytes && memcmp(a, b, a_bytes - sizeof(FileStamp)) == 0;
    if (!is_equal) {
      list.add_number(order <= 0 ? static_cast<uint64_t>(a - old) : kNoOffset);
      list.add_number(order >= 0 ? static_cast<uint64_t>(b - now) : kNoOffset);
    }
    a += a_bytes;
    b += b_bytes;
  }
  set_output(out, ByteBuffer{}, list);
  return 0;
}

// Returns `old` with the records of `changes` replaced or added; one of kind 'r' removes a record.
EXPORTED int32_t genie_merge_records(const uint8_t* old, uint64_t old_bytes, const uint8_t* changes,
                                     uint64_t change_bytes, CallOutput* out) {
  if (!are_records_complete(old, old_bytes) || !are_records_complete(changes, change_bytes))
    return set_error(out, EBADMSG, "", 0);
  ByteBuffer merged;
  const uint8_t *a = old, *b = changes, *a_end = old + old_bytes, *b_end = changes + change_bytes;
  while (a < a_end || b < b_end) {
    const int order = a >= a_end ? 1 : b >= b_end ? -1 : compare_record_paths(TreeRecord(a), TreeRecord(b));
    if (order < 0) merged.add(a, TreeRecord(a).bytes());
    if (order >= 0 && TreeRecord(b).header.kind != 'r') merged.add(b, TreeRecord(b).bytes());
    if (order <= 0) a += TreeRecord(a).bytes();
    if (order >= 0) b += TreeRecord(b).bytes();
  }
  set_output(out, merged, ByteBuffer{});
  return 0;
}

// Returns the records without stamps and excluded paths, which both sides must agree on.
EXPORTED int32_t genie_remove_stamps(const uint8_t* records, uint64_t bytes, CallOutput* out) {
  if (!are_records_complete(records, bytes)) return set_error(out, EBADMSG, "", 0);
  ByteBuffer plain;
  for (const uint8_t* at = records; at < records + bytes;) {
    const TreeRecord record(at);
    if (record.header.kind != 'x') plain.add(at, record.bytes_without_stamp());
    at += record.bytes();
  }
  set_output(out, plain, ByteBuffer{});
  return 0;
}

EXPORTED void genie_free_output(CallOutput* out) {
  free(out->data);
  free(out->numbers);
}

}  // extern "C"
}  // namespace genie
