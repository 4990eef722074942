// File trees for the grid's sync: walks, reads, stages, places and checks many small files.
//
// genie/grid/remote/tree.py defines the format, has a Python implementation of every function, and calls
// these through ctypes, on this machine and on nodes. Therefore: a C interface, C++17, linked only to the C
// library. A property test checks that both are equivalent. Does not decide what is sent or deleted.
//
// A record: TreeRecordHeader, path, link target, FileStamp. Records are in walk order: a directory, then its
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

constexpr int kDirectoryDepthMax = 256;
constexpr int kPathBytesMax = 4096;
constexpr uint64_t kMissingRecordOffset = ~uint64_t{0};
constexpr int64_t kNanosecondsPerSecond = 1000000000;
// File times have a resolution of 1 to 10 ms; some file systems store whole seconds only.
constexpr int64_t kFileTimeResolutionNs = 20000000;
constexpr int64_t kSmallFileBytesMax = 256 << 10;
constexpr int64_t kSparseFileBytesMin = 64 << 10;

struct TreeRecordHeader {
  uint8_t kind;                   // 'd', 'f', 'l', 'x' for excluded, 'r' for removed
  uint8_t is_excluded_directory;  // of 'x'
  uint16_t mode;
  uint16_t path_bytes;
  uint16_t link_target_bytes;
  uint64_t file_bytes;
  int64_t mtime_ns;
  uint8_t sha256[32];
};
static_assert(sizeof(TreeRecordHeader) == 56);

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
  uint8_t padding;
  uint16_t mode;
  uint32_t file_number;
  uint64_t file_bytes;
  int64_t mtime_ns;
  uint8_t sha256[32];
};
static_assert(sizeof(FileFrameHeader) == 56);

struct TreeRecord {
  TreeRecordHeader header;
  const uint8_t* record_start;

  explicit TreeRecord(const uint8_t* from) : record_start(from) { memcpy(&header, from, sizeof header); }
  const char* path() const { return reinterpret_cast<const char*>(record_start + sizeof(TreeRecordHeader)); }
  const uint8_t* link_target() const { return record_start + sizeof(TreeRecordHeader) + header.path_bytes; }
  uint64_t bytes_without_stamp() const {
    return sizeof(TreeRecordHeader) + header.path_bytes + header.link_target_bytes;
  }
  uint64_t size_bytes() const { return bytes_without_stamp() + sizeof(FileStamp); }
  FileStamp stamp() const {
    FileStamp found;
    memcpy(&found, record_start + bytes_without_stamp(), sizeof found);
    return found;
  }
  bool is_directory() const {
    return header.kind == 'd' || (header.kind == 'x' && header.is_excluded_directory != 0);
  }
};

// Sorts '/' before every other byte, so that the contents of a directory directly follow it.
int compare_paths_in_walk_order(const char* a, size_t a_bytes, const char* b, size_t b_bytes) {
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
  return compare_paths_in_walk_order(a.path(), a.header.path_bytes, b.path(), b.header.path_bytes);
}

timespec to_timespec(int64_t nanoseconds) {
  const int64_t rest = (nanoseconds % kNanosecondsPerSecond + kNanosecondsPerSecond) % kNanosecondsPerSecond;
  timespec time = {};
  time.tv_sec = (nanoseconds - rest) / kNanosecondsPerSecond;
  time.tv_nsec = rest;
  return time;
}

int64_t to_nanoseconds(const timespec& time) { return time.tv_sec * kNanosecondsPerSecond + time.tv_nsec; }

FileStamp stamp_from_stat(const struct stat& found) {
  return {static_cast<uint64_t>(found.st_ino), to_nanoseconds(found.st_mtim), to_nanoseconds(found.st_ctim)};
}

bool is_same_stamp(const FileStamp& a, const FileStamp& b) {
  return a.inode == b.inode && a.mtime_ns == b.mtime_ns && a.ctime_ns == b.ctime_ns;
}

// True if the file was written so shortly before the scan that a later write may have the same times.
bool is_written_shortly_before_walk(const FileStamp& stamp, int64_t walk_time_ns) {
  const bool whole =
      stamp.mtime_ns % kNanosecondsPerSecond == 0 && stamp.ctime_ns % kNanosecondsPerSecond == 0;
  return std::max(stamp.mtime_ns, stamp.ctime_ns) +
             (whole ? 2 * kNanosecondsPerSecond : kFileTimeResolutionNs) >=
         walk_time_ns;
}

struct ByteBuffer {
  uint8_t* data = nullptr;
  uint64_t size = 0;
  uint64_t capacity = 0;

  uint8_t* append_uninitialized(uint64_t more) {
    if (size + more > capacity) {
      capacity = std::max(capacity * 2, size + more + 4096);
      data = static_cast<uint8_t*>(realloc(data, capacity));
      if (data == nullptr) abort();
    }
    size += more;
    return data + size - more;
  }
  void append(const void* from, uint64_t bytes) {
    if (bytes != 0) memcpy(append_uninitialized(bytes), from, bytes);
  }
  void append_number(uint64_t number) { append(&number, sizeof number); }
};

}  // namespace

// Output of every function; the caller passes it to genie_free_output().
struct CallOutput {
  uint8_t* data;
  uint64_t byte_count;  // of `data`, or consumed or written by the call
  uint64_t* numbers;
  uint64_t number_count;  // of `numbers`, or of staged files
  uint64_t skipped_special_files;
  int32_t is_tree_unchanged;
  int32_t has_gitignore_changed;
  int32_t error_code;  // an errno, or -1 if the IsExcludedFunction callback failed
  char error_path[kPathBytesMax + 8];
};

namespace {

int fail_with_error(CallOutput* out, int error, const char* path, size_t path_bytes) {
  out->error_code = error;
  const size_t length = std::min(path_bytes, sizeof out->error_path - 1);
  if (length != 0) memcpy(out->error_path, path, length);
  out->error_path[length] = 0;
  return -1;
}

void move_buffers_to_output(CallOutput* out, const ByteBuffer& data, const ByteBuffer& list) {
  out->data = data.data;
  out->byte_count = data.size;
  out->numbers = reinterpret_cast<uint64_t*>(list.data);
  out->number_count = list.size / sizeof(uint64_t);
}

// Opens the directory of a path, step by step from the root. Consecutive paths share open directories.
class OpenDirectories {
 public:
  explicit OpenDirectories(int root) { fds_[0] = root; }
  ~OpenDirectories() { close_deeper_than(0); }
  OpenDirectories(const OpenDirectories&) = delete;
  OpenDirectories& operator=(const OpenDirectories&) = delete;

  // Returns the parent directory of `path` and sets `name`; -1 with errno.
  int open_parent(const char* path, size_t path_bytes, const char** name) {
    if (path_bytes == 0 || path_bytes >= kPathBytesMax) return fail_with_errno(ENAMETOOLONG);
    memcpy(wanted_path_, path, path_bytes);
    wanted_path_[path_bytes] = 0;
    if (memchr(wanted_path_, 0, path_bytes) != nullptr) return fail_with_errno(EINVAL);
    const char* slash = strrchr(wanted_path_, '/');
    const size_t directory_path_bytes = slash == nullptr ? 0 : static_cast<size_t>(slash - wanted_path_);
    *name = slash == nullptr ? wanted_path_ : slash + 1;
    if (!is_plain_name(*name)) return fail_with_errno(EINVAL);
    while (open_depth_ > 0 && !is_open_path_above_wanted(directory_path_bytes))
      close_deeper_than(open_depth_ - 1);
    while (open_path_ends_[open_depth_] < directory_path_bytes) {
      if (open_next_component(directory_path_bytes) < 0) return -1;
    }
    return fds_[open_depth_];
  }

 private:
  static int fail_with_errno(int error) {
    errno = error;
    return -1;
  }
  static bool is_plain_name(const char* name) {
    return *name != 0 && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
  }
  bool is_open_path_above_wanted(size_t directory_path_bytes) const {
    const size_t end = open_path_ends_[open_depth_];
    return end <= directory_path_bytes && memcmp(open_path_, wanted_path_, end) == 0 &&
           (end == directory_path_bytes || wanted_path_[end] == '/');
  }
  int open_next_component(size_t directory_path_bytes) {
    if (open_depth_ + 1 >= kDirectoryDepthMax) return fail_with_errno(ENAMETOOLONG);
    const size_t begin = open_path_ends_[open_depth_] == 0 ? 0 : open_path_ends_[open_depth_] + 1;
    const void* slash = memchr(wanted_path_ + begin, '/', directory_path_bytes - begin);
    const size_t end = slash == nullptr ? directory_path_bytes
                                        : static_cast<size_t>(static_cast<const char*>(slash) - wanted_path_);
    char name[kPathBytesMax];
    memcpy(name, wanted_path_ + begin, end - begin);
    name[end - begin] = 0;
    if (!is_plain_name(name)) return fail_with_errno(EINVAL);
    const int fd = openat(fds_[open_depth_], name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return -1;
    memcpy(open_path_, wanted_path_, end);
    fds_[++open_depth_] = fd;
    open_path_ends_[open_depth_] = end;
    return 0;
  }
  void close_deeper_than(int depth) {
    while (open_depth_ > depth) close(fds_[open_depth_--]);
  }

  int fds_[kDirectoryDepthMax];
  size_t open_path_ends_[kDirectoryDepthMax] = {0};
  int open_depth_ = 0;
  char open_path_[kPathBytesMax];
  char wanted_path_[kPathBytesMax];
};

using IsExcludedFunction = int32_t (*)(const char* path, uint64_t bytes, int32_t is_directory);

struct DirectoryEntry {
  uint64_t name_offset;
  uint8_t type;
};

class TreeWalker {
 public:
  TreeWalker(const uint8_t* old, uint64_t old_bytes, int64_t old_walk_time_ns, bool reuse_old_exclusions,
             IsExcludedFunction is_excluded, CallOutput* out)
      : next_old_record_(old),
        old_records_end_(old + old_bytes),
        old_walk_time_ns_(old_walk_time_ns),
        reuse_old_exclusions_(reuse_old_exclusions),
        is_excluded_function_(is_excluded),
        output_(out) {}

  int walk_tree(const char* root) {
    const int fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fail_with_error(output_, errno, "", 0);
    const uint8_t* old = next_old_record_;
    const uint64_t old_bytes = static_cast<uint64_t>(old_records_end_ - next_old_record_);
    int status = walk_directory(fd, 0, 0);
    while (status == 0 && next_old_record_ < old_records_end_) skip_old_record();
    output_->is_tree_unchanged = status == 0 && unhashed_record_offsets_.size == 0 &&
                                 records_.size == old_bytes &&
                                 (old_bytes == 0 || memcmp(records_.data, old, old_bytes) == 0);
    move_buffers_to_output(output_, records_, unhashed_record_offsets_);
    return status;
  }

 private:
  // Takes ownership of the descriptor. current_path_ starts with the path of the directory.
  int walk_directory(int fd, size_t path_bytes, int depth) {
    DIR* dir = fdopendir(fd);
    if (dir == nullptr) {
      const int error = errno;
      close(fd);
      return fail_with_error(output_, error, current_path_, path_bytes);
    }
    ByteBuffer text, names;
    const int error = read_directory_entries(dir, depth, &text, &names);
    DirectoryEntry* first = reinterpret_cast<DirectoryEntry*>(names.data);
    const uint64_t count = names.size / sizeof(DirectoryEntry);
    const char* base = reinterpret_cast<const char*>(text.data);
    std::sort(first, first + count, [base](const DirectoryEntry& a, const DirectoryEntry& b) {
      return strcmp(base + a.name_offset, base + b.name_offset) < 0;
    });
    int status = error == 0 ? 0 : fail_with_error(output_, error, current_path_, path_bytes);
    for (uint64_t i = 0; status == 0 && i < count; ++i) {
      status = add_records_of_entry(fd, base + first[i].name_offset, first[i].type, path_bytes, depth);
    }
    closedir(dir);
    free(text.data);
    free(names.data);
    return status;
  }

  static int read_directory_entries(DIR* dir, int depth, ByteBuffer* text, ByteBuffer* names) {
    for (;;) {
      errno = 0;
      const dirent* found = readdir(dir);
      if (found == nullptr) return errno;
      const char* name = found->d_name;
      if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) continue;
      if (depth == 0 && (strcmp(name, ".grid") == 0 || strcmp(name, "grid_env") == 0)) continue;
      const DirectoryEntry entry = {text->size, found->d_type};
      text->append(name, strlen(name) + 1);
      names->append(&entry, sizeof entry);
    }
  }

  int add_records_of_entry(int fd, const char* name, uint8_t type, size_t directory_path_bytes, int depth) {
    const size_t begin = directory_path_bytes == 0 ? 0 : directory_path_bytes + 1;
    const size_t name_bytes = strlen(name);
    if (begin + name_bytes >= kPathBytesMax || depth + 1 >= kDirectoryDepthMax) {
      return fail_with_error(output_, ENAMETOOLONG, current_path_, directory_path_bytes);
    }
    if (directory_path_bytes != 0) current_path_[directory_path_bytes] = '/';
    memcpy(current_path_ + begin, name, name_bytes + 1);
    const size_t path_bytes = begin + name_bytes;
    struct stat found;
    bool have_stat = false;
    if (type == DT_UNKNOWN) {
      if (fstatat(fd, name, &found, AT_SYMLINK_NOFOLLOW) < 0) return fail_unless_removed(path_bytes);
      have_stat = true;
      type = IFTODT(found.st_mode);
    }
    if (type != DT_DIR && type != DT_REG && type != DT_LNK) {
      ++output_->skipped_special_files;
      return 0;
    }
    const uint8_t* old = advance_to_old_record(path_bytes);
    const bool is_gitignore = type == DT_REG && strcmp(name, ".gitignore") == 0;
    if (old != nullptr && !is_gitignore && was_gitignore_file(TreeRecord(old)))
      output_->has_gitignore_changed = 1;
    const int excluded = exclusion_or_error(old, path_bytes, type == DT_DIR);
    if (excluded < 0) return fail_with_error(output_, -1, current_path_, path_bytes);
    if (!excluded || is_gitignore) {
      if (!have_stat && fstatat(fd, name, &found, AT_SYMLINK_NOFOLLOW) < 0)
        return fail_unless_removed(path_bytes);
      if (IFTODT(found.st_mode) != type) return 0;  // just replaced: the next walk finds it
    }
    if (is_gitignore && !(old != nullptr && is_same_stamp(TreeRecord(old).stamp(), stamp_from_stat(found))))
      output_->has_gitignore_changed = 1;
    if (excluded) return add_excluded_record(path_bytes, type == DT_DIR, is_gitignore ? &found : nullptr);
    if (type == DT_REG) return add_file_record(old, path_bytes, found);
    if (type == DT_LNK) return add_symlink_record(fd, name, path_bytes, found);
    return add_directory_and_contents(fd, name, path_bytes, found, depth);
  }

  // Ignores a file that has been removed since it was listed.
  int fail_unless_removed(size_t path_bytes) {
    return errno == ENOENT ? 0 : fail_with_error(output_, errno, current_path_, path_bytes);
  }

  int exclusion_or_error(const uint8_t* old, size_t path_bytes, bool is_directory) {
    if (reuse_old_exclusions_ && old != nullptr) {
      const TreeRecord known(old);
      if (known.is_directory() == is_directory) return known.header.kind == 'x';
    }
    return is_excluded_function_(current_path_, path_bytes, is_directory);
  }

  int add_excluded_record(size_t path_bytes, bool is_directory, const struct stat* found) {
    TreeRecordHeader header = {};
    header.kind = 'x';
    header.is_excluded_directory = is_directory;
    append_record(header, path_bytes, nullptr, found == nullptr ? FileStamp{} : stamp_from_stat(*found));
    return 0;
  }

  int add_file_record(const uint8_t* old, size_t path_bytes, const struct stat& found) {
    const FileStamp stamp = stamp_from_stat(found);
    TreeRecordHeader header = {};
    header.kind = 'f';
    header.mode = found.st_mode & 07777;
    header.file_bytes = static_cast<uint64_t>(found.st_size);
    header.mtime_ns = stamp.mtime_ns;
    bool is_clean = false;
    if (old != nullptr) {
      const TreeRecord known(old);
      is_clean = known.header.kind == 'f' && known.header.file_bytes == header.file_bytes &&
                 is_same_stamp(known.stamp(), stamp) &&
                 !is_written_shortly_before_walk(stamp, old_walk_time_ns_);
      if (is_clean) memcpy(header.sha256, known.header.sha256, sizeof header.sha256);
    }
    if (!is_clean) unhashed_record_offsets_.append_number(records_.size);
    append_record(header, path_bytes, nullptr, stamp);
    return 0;
  }

  int add_symlink_record(int fd, const char* name, size_t path_bytes, const struct stat& found) {
    char target[kPathBytesMax];
    const ssize_t count = readlinkat(fd, name, target, sizeof target);
    if (count < 0) return fail_unless_removed(path_bytes);
    TreeRecordHeader header = {};
    header.kind = 'l';
    header.mode = 0777;
    header.link_target_bytes = static_cast<uint16_t>(count);
    append_record(header, path_bytes, target, stamp_from_stat(found));
    return 0;
  }

  int add_directory_and_contents(int fd, const char* name, size_t path_bytes, const struct stat& found,
                                 int depth) {
    const int inner = openat(fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (inner < 0) return fail_unless_removed(path_bytes);
    TreeRecordHeader header = {};
    header.kind = 'd';
    header.mode = found.st_mode & 07777;
    append_record(header, path_bytes, nullptr, FileStamp{});
    return walk_directory(inner, path_bytes, depth + 1);
  }

  void append_record(TreeRecordHeader header, size_t path_bytes, const char* link, const FileStamp& stamp) {
    header.path_bytes = static_cast<uint16_t>(path_bytes);
    records_.append(&header, sizeof header);
    records_.append(current_path_, path_bytes);
    if (link != nullptr) records_.append(link, header.link_target_bytes);
    records_.append(&stamp, sizeof stamp);
  }

  // Returns the old record of current_path_, or null. Old records are in walk order too.
  const uint8_t* advance_to_old_record(size_t path_bytes) {
    while (next_old_record_ < old_records_end_) {
      const TreeRecord next(next_old_record_);
      const int order =
          compare_paths_in_walk_order(next.path(), next.header.path_bytes, current_path_, path_bytes);
      if (order > 0) return nullptr;
      if (order == 0) {
        next_old_record_ += next.size_bytes();
        return next.record_start;
      }
      skip_old_record();
    }
    return nullptr;
  }

  void skip_old_record() {
    const TreeRecord removed(next_old_record_);
    if (was_gitignore_file(removed)) output_->has_gitignore_changed = 1;
    next_old_record_ += removed.size_bytes();
  }

  static bool was_gitignore_file(const TreeRecord& old) {
    static constexpr char kGitignoreName[] = ".gitignore";
    constexpr size_t kGitignoreNameBytes = sizeof kGitignoreName - 1;
    const size_t path_bytes = old.header.path_bytes;
    const bool is_file = old.header.kind == 'f' || (old.header.kind == 'x' && old.stamp().inode != 0);
    return is_file && path_bytes >= kGitignoreNameBytes &&
           memcmp(old.path() + path_bytes - kGitignoreNameBytes, kGitignoreName, kGitignoreNameBytes) == 0 &&
           (path_bytes == kGitignoreNameBytes || old.path()[path_bytes - kGitignoreNameBytes - 1] == '/');
  }

  const uint8_t* next_old_record_;
  const uint8_t* old_records_end_;
  int64_t old_walk_time_ns_;
  bool reuse_old_exclusions_;
  IsExcludedFunction is_excluded_function_;
  CallOutput* output_;
  ByteBuffer records_;
  ByteBuffer unhashed_record_offsets_;
  char current_path_[kPathBytesMax];
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

bool has_recorded_size_and_stamp(const struct stat& found, const TreeRecord& record) {
  return S_ISREG(found.st_mode) && static_cast<uint64_t>(found.st_size) == record.header.file_bytes &&
         is_same_stamp(stamp_from_stat(found), record.stamp());
}

bool is_sparse(const struct stat& found) {
  return found.st_size >= kSparseFileBytesMin && found.st_blocks * 512 < found.st_size;
}

// Returns 0 if the file is in the buffer, 1 if it needs the slow path, -1 if the buffer is full.
int read_small_file_into_frame(OpenDirectories* directories, const TreeRecord& record, uint32_t number,
                               uint8_t* into, uint64_t capacity) {
  if (record.header.file_bytes > static_cast<uint64_t>(kSmallFileBytesMax)) return 1;
  if (sizeof(FileFrameHeader) + record.header.file_bytes > capacity) return -1;
  const char* name;
  const int parent = directories->open_parent(record.path(), record.header.path_bytes, &name);
  if (parent < 0) return 1;
  const int fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return 1;
  struct stat before, after;
  const bool is_whole = fstat(fd, &before) == 0 && has_recorded_size_and_stamp(before, record) &&
                        !is_sparse(before) &&
                        try_read_all(fd, into + sizeof(FileFrameHeader), record.header.file_bytes) &&
                        fstat(fd, &after) == 0 && has_recorded_size_and_stamp(after, record);
  close(fd);
  if (!is_whole) return 1;
  FileFrameHeader frame = {};
  frame.kind = 'F';
  frame.mode = record.header.mode;
  frame.file_number = number;
  frame.file_bytes = record.header.file_bytes;
  frame.mtime_ns = record.header.mtime_ns;
  memcpy(into, &frame, sizeof frame);
  return 0;
}

void format_staged_file_name(const uint8_t* sha256, uint64_t size, char* into) {
  static constexpr char kHexDigits[] = "0123456789abcdef";
  for (int i = 0; i < 32; ++i) {
    *into++ = kHexDigits[sha256[i] >> 4];
    *into++ = kHexDigits[sha256[i] & 15];
  }
  snprintf(into, 24, ".%llx", static_cast<unsigned long long>(size));
}

int stage_file(int staging_fd, const FileFrameHeader& frame, const uint8_t* data, const char* name) {
  const int fd =
      openat(staging_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, frame.mode & 0777);
  if (fd < 0) return errno == EEXIST ? 0 : errno;
  const timespec times[2] = {{0, UTIME_OMIT}, to_timespec(frame.mtime_ns)};
  int error = try_write_all(fd, data, frame.file_bytes) && futimens(fd, times) == 0 ? 0 : errno;
  if (close(fd) < 0 && error == 0) error = errno;
  if (error != 0) unlinkat(staging_fd, name, 0);
  return error;
}

// Sets mode and time of the staged file; returns 0 or an errno. `is_placed`: the file is already in place.
int set_staged_file_mode_and_time(int staging_fd, const char* staged_name, int parent, const char* name,
                                  const TreeRecord& record, bool* is_placed) {
  struct stat found;
  if (fstatat(staging_fd, staged_name, &found, AT_SYMLINK_NOFOLLOW) < 0) {
    if (errno != ENOENT) return errno;
    *is_placed = fstatat(parent, name, &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(found.st_mode) &&
                 static_cast<uint64_t>(found.st_size) == record.header.file_bytes &&
                 to_nanoseconds(found.st_mtim) == record.header.mtime_ns;
    return *is_placed ? 0 : ENOENT;
  }
  if ((found.st_mode & 07777) != record.header.mode &&
      fchmodat(staging_fd, staged_name, record.header.mode, 0) < 0) {
    return errno;
  }
  const int64_t mtime_ns = record.header.mtime_ns;
  const timespec times[2] = {{0, UTIME_OMIT}, to_timespec(mtime_ns)};
  if (to_nanoseconds(found.st_mtim) != mtime_ns &&
      utimensat(staging_fd, staged_name, times, AT_SYMLINK_NOFOLLOW) < 0) {
    return errno;
  }
  return 0;
}

int create_directory_if_missing(int parent, const char* name) {
  if (mkdirat(parent, name, 0700) == 0) return 0;
  struct stat found;
  if (errno != EEXIST || fstatat(parent, name, &found, AT_SYMLINK_NOFOLLOW) < 0) return errno;
  return S_ISDIR(found.st_mode) ? 0 : ENOTDIR;
}

int create_directory_or_move_file(OpenDirectories* directories, int staging_fd, const TreeRecord& record) {
  const char* name;
  const int parent = directories->open_parent(record.path(), record.header.path_bytes, &name);
  if (parent < 0) return errno;
  if (record.header.kind == 'd') return create_directory_if_missing(parent, name);
  char staged_name[96];
  format_staged_file_name(record.header.sha256, record.header.file_bytes, staged_name);
  bool is_placed = false;
  const int error = set_staged_file_mode_and_time(staging_fd, staged_name, parent, name, record, &is_placed);
  if (error != 0 || is_placed) return error;
  return renameat(staging_fd, staged_name, parent, name) == 0 ? 0 : errno;
}

// Whether the file at the record's path is unchanged. `found` is set if a file exists.
bool is_entry_as_recorded(OpenDirectories* directories, const TreeRecord& record, int64_t walk_time_ns,
                          struct stat* found, bool* exists) {
  const char* name;
  const int parent = directories->open_parent(record.path(), record.header.path_bytes, &name);
  *exists = parent >= 0 && fstatat(parent, name, found, AT_SYMLINK_NOFOLLOW) == 0;
  if (!*exists) return false;
  if (record.header.kind == 'd')
    return S_ISDIR(found->st_mode) && (found->st_mode & 07777) == record.header.mode;
  const mode_t kind = record.header.kind == 'f' ? S_IFREG : S_IFLNK;
  if ((found->st_mode & S_IFMT) != kind || !is_same_stamp(record.stamp(), stamp_from_stat(*found)))
    return false;
  if (record.header.kind == 'l') return true;
  return static_cast<uint64_t>(found->st_size) == record.header.file_bytes &&
         (found->st_mode & 07777) == record.header.mode &&
         !is_written_shortly_before_walk(record.stamp(), walk_time_ns);
}

// Records come from disks and other machines, so their sizes are validated before use.
bool are_records_complete(const uint8_t* records, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes;) {
    if (bytes - at < sizeof(TreeRecordHeader) + sizeof(FileStamp)) return false;
    const uint64_t size = TreeRecord(records + at).size_bytes();
    if (size > bytes - at) return false;
    at += size;
  }
  return true;
}

const uint8_t* skip_excluded_records(const uint8_t* at, const uint8_t* end) {
  while (at < end && TreeRecord(at).header.kind == 'x') at += TreeRecord(at).size_bytes();
  return at;
}

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

// Returns records of all files in a directory. `numbers` has the offsets of files with unknown contents.
EXPORTED int32_t genie_walk_tree(const char* root, const uint8_t* old, uint64_t old_bytes,
                                 int64_t old_walk_time_ns, int32_t reuse_old_exclusions,
                                 IsExcludedFunction is_excluded, CallOutput* out) {
  if (!are_records_complete(old, old_bytes)) return fail_with_error(out, EBADMSG, "", 0);
  return TreeWalker(old, old_bytes, old_walk_time_ns, reuse_old_exclusions != 0, is_excluded, out)
      .walk_tree(root);
}

// Returns frames of the small files at `offsets`, as many as fit. `numbers` has 0 for a file in the buffer
// and 1 for one that needs the slow path; `byte_count` is the number of bytes used.
EXPORTED int32_t genie_read_small_files(int32_t root, const uint8_t* records, const uint64_t* offsets,
                                        uint64_t count, uint32_t first_number, uint8_t* into,
                                        uint64_t capacity, CallOutput* out) {
  OpenDirectories directories(root);
  ByteBuffer list;
  uint64_t used = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const TreeRecord record(records + offsets[i]);
    const uint32_t number = first_number + static_cast<uint32_t>(i);
    const int status = read_small_file_into_frame(&directories, record, number, into + used, capacity - used);
    if (status < 0) break;
    list.append_number(static_cast<uint64_t>(status));
    if (status == 0) used += sizeof(FileFrameHeader) + record.header.file_bytes;
  }
  move_buffers_to_output(out, ByteBuffer{}, list);
  out->byte_count = used;
  return 0;
}

// Writes the complete frames at the beginning of `data`. `byte_count` is the bytes consumed, `number_count`
// the frames.
EXPORTED int32_t genie_stage_files(int32_t staging_fd, const uint8_t* data, uint64_t bytes, CallOutput* out) {
  while (bytes - out->byte_count >= sizeof(FileFrameHeader)) {
    FileFrameHeader frame;
    memcpy(&frame, data + out->byte_count, sizeof frame);
    if (frame.kind != 'F' || frame.file_bytes > bytes - out->byte_count - sizeof frame) break;
    char name[96];
    format_staged_file_name(frame.sha256, frame.file_bytes, name);
    const int error = stage_file(staging_fd, frame, data + out->byte_count + sizeof frame, name);
    if (error != 0) return fail_with_error(out, error, name, strlen(name));
    out->byte_count += sizeof frame + frame.file_bytes;
    ++out->number_count;
  }
  return 0;
}

// Creates directories and moves staged files to the paths of their records. `byte_count` is the bytes
// consumed.
EXPORTED int32_t genie_place_entries(int32_t root, int32_t staging_fd, const uint8_t* records, uint64_t bytes,
                                     CallOutput* out) {
  if (!are_records_complete(records, bytes)) return fail_with_error(out, EBADMSG, "", 0);
  OpenDirectories directories(root);
  while (out->byte_count < bytes) {
    const TreeRecord record(records + out->byte_count);
    const int error = create_directory_or_move_file(&directories, staging_fd, record);
    if (error != 0) return fail_with_error(out, error, record.path(), record.header.path_bytes);
    out->byte_count += record.size_bytes();
  }
  return 0;
}

// `numbers` has the offsets of records that do not match the files. With `fill_stamps`, only missing stamps
// are filled in from the files.
EXPORTED int32_t genie_check_records(int32_t root, uint8_t* records, uint64_t bytes, int64_t walk_time_ns,
                                     int32_t fill_stamps, CallOutput* out) {
  if (!are_records_complete(records, bytes)) return fail_with_error(out, EBADMSG, "", 0);
  OpenDirectories directories(root);
  ByteBuffer list;
  for (uint64_t at = 0; at < bytes;) {
    const TreeRecord record(records + at);
    const bool is_new = record.header.kind != 'd' && record.stamp().inode == 0;
    struct stat found;
    bool exists = false;
    if (fill_stamps == 0) {
      if (!is_entry_as_recorded(&directories, record, walk_time_ns, &found, &exists)) list.append_number(at);
    } else if (is_new) {
      is_entry_as_recorded(&directories, record, walk_time_ns, &found, &exists);
      const FileStamp stamp = exists ? stamp_from_stat(found) : FileStamp{};
      memcpy(records + at + record.bytes_without_stamp(), &stamp, sizeof stamp);
    }
    at += record.size_bytes();
  }
  move_buffers_to_output(out, ByteBuffer{}, list);
  return 0;
}

// `numbers` has pairs of offsets, old and new, of records that differ; one of a pair may be
// kMissingRecordOffset.
EXPORTED int32_t genie_compare_records(const uint8_t* old, uint64_t old_bytes, const uint8_t* now,
                                       uint64_t now_bytes, CallOutput* out) {
  if (!are_records_complete(old, old_bytes) || !are_records_complete(now, now_bytes))
    return fail_with_error(out, EBADMSG, "", 0);
  ByteBuffer list;
  const uint8_t *a = old, *b = now, *a_end = old + old_bytes, *b_end = now + now_bytes;
  for (;;) {
    a = skip_excluded_records(a, a_end);
    b = skip_excluded_records(b, b_end);
    if (a >= a_end && b >= b_end) break;
    const int order = a >= a_end ? 1 : b >= b_end ? -1 : compare_record_paths(TreeRecord(a), TreeRecord(b));
    const uint64_t a_bytes = order <= 0 ? TreeRecord(a).size_bytes() : 0;
    const uint64_t b_bytes = order >= 0 ? TreeRecord(b).size_bytes() : 0;
    const bool is_equal = order == 0 && a_bytes == b_bytes && memcmp(a, b, a_bytes - sizeof(FileStamp)) == 0;
    if (!is_equal) {
      list.append_number(order <= 0 ? static_cast<uint64_t>(a - old) : kMissingRecordOffset);
      list.append_number(order >= 0 ? static_cast<uint64_t>(b - now) : kMissingRecordOffset);
    }
    a += a_bytes;
    b += b_bytes;
  }
  move_buffers_to_output(out, ByteBuffer{}, list);
  return 0;
}

// Returns `old` with the records of `changes` replaced or added; one of kind 'r' removes a record.
EXPORTED int32_t genie_merge_records(const uint8_t* old, uint64_t old_bytes, const uint8_t* changes,
                                     uint64_t change_bytes, CallOutput* out) {
  if (!are_records_complete(old, old_bytes) || !are_records_complete(changes, change_bytes))
    return fail_with_error(out, EBADMSG, "", 0);
  ByteBuffer merged;
  const uint8_t *a = old, *b = changes, *a_end = old + old_bytes, *b_end = changes + change_bytes;
  while (a < a_end || b < b_end) {
    const int order = a >= a_end ? 1 : b >= b_end ? -1 : compare_record_paths(TreeRecord(a), TreeRecord(b));
    if (order < 0) merged.append(a, TreeRecord(a).size_bytes());
    if (order >= 0 && TreeRecord(b).header.kind != 'r') merged.append(b, TreeRecord(b).size_bytes());
    if (order <= 0) a += TreeRecord(a).size_bytes();
    if (order >= 0) b += TreeRecord(b).size_bytes();
  }
  move_buffers_to_output(out, merged, ByteBuffer{});
  return 0;
}

// Returns the records without stamps and excluded paths, which both sides must agree on.
EXPORTED int32_t genie_remove_stamps(const uint8_t* records, uint64_t bytes, CallOutput* out) {
  if (!are_records_complete(records, bytes)) return fail_with_error(out, EBADMSG, "", 0);
  ByteBuffer plain;
  for (const uint8_t* at = records; at < records + bytes;) {
    const TreeRecord record(at);
    if (record.header.kind != 'x') plain.append(at, record.bytes_without_stamp());
    at += record.size_bytes();
  }
  move_buffers_to_output(out, plain, ByteBuffer{});
  return 0;
}

EXPORTED void genie_free_output(CallOutput* out) {
  free(out->data);
  free(out->numbers);
}

}  // extern "C"
}  // namespace genie
