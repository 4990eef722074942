// Asks a Slurm controller for one GPU at a time and says when each was granted; built by slurm_peer.py.
//
//     slurm_client quiet JOBS GAP_S          one after the other, with a pause after each
//     slurm_client busy WORKERS SECONDS      each worker asks, is granted, gives back, until the time is over
//
// The lines it writes are those of peer_room.py. It goes through libslurm, in one process: what salloc
// --no-shell does, without starting salloc for each job. Not for: the cluster itself.

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace genie {

using Clock = std::chrono::steady_clock;

constexpr time_t kGrantTimeoutS = 30;

struct Granted {
  double at_s;
  double taken_ms;
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, slurm_strerror(slurm_get_errno()));
  std::exit(1);
}

job_desc_msg_t one_gpu() {
  static char name[] = "bench", gpu[] = "gres:gpu:1", folder[] = "/";
  job_desc_msg_t wish;
  slurm_init_job_desc_msg(&wish);
  wish.name = name;
  wish.tres_per_node = gpu;
  wish.work_dir = folder;
  wish.min_nodes = wish.max_nodes = 1;
  wish.num_tasks = wish.min_cpus = 1;
  wish.user_id = getuid();
  wish.group_id = getgid();
  return wish;
}

// Granted means that the controller has named the node. The job is over when this returns.
Granted place() {
  auto wish = one_gpu();
  const auto began = Clock::now();
  auto* answer = slurm_allocate_resources_blocking(&wish, kGrantTimeoutS, nullptr);
  const auto now = Clock::now();
  if (answer == nullptr || answer->node_list == nullptr) fail("nothing was granted");
  Granted granted{std::chrono::duration<double>(now.time_since_epoch()).count(),
                  std::chrono::duration<double, std::milli>(now - began).count()};
  if (slurm_complete_job(answer->job_id, 0) != SLURM_SUCCESS) fail("a job could not be ended");
  slurm_free_resource_allocation_response_msg(answer);
  return granted;
}

std::vector<Granted> quiet(int jobs, double gap_s) {
  std::vector<Granted> all;
  for (int job = 0; job < jobs; ++job) {
    all.push_back(place());
    std::this_thread::sleep_for(std::chrono::duration<double>(gap_s));
  }
  return all;
}

std::vector<Granted> busy(int workers, double seconds) {
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  std::vector<std::vector<Granted>> of_worker(workers);
  {
    std::vector<std::jthread> threads;
    for (auto& own : of_worker)
      threads.emplace_back([&own, until] {
        while (Clock::now() < until) own.push_back(place());
      });
  }
  std::vector<Granted> all;
  for (auto& own : of_worker) all.insert(all.end(), own.begin(), own.end());
  return all;
}

int run(const std::vector<std::string>& words) {
  if (words.size() != 3 || (words[0] != "quiet" && words[0] != "busy")) {
    std::fputs("usage: slurm_client quiet JOBS GAP_S | busy WORKERS SECONDS\n", stderr);
    return 2;
  }
  slurm_init(nullptr);
  const auto count = std::stoi(words[1]);
  const auto time_s = std::stod(words[2]);
  std::printf("began %.6f\n", std::chrono::duration<double>(Clock::now().time_since_epoch()).count());
  for (const auto& granted : words[0] == "quiet" ? quiet(count, time_s) : busy(count, time_s))
    std::printf("placed %.6f %.3f\n", granted.at_s, granted.taken_ms);
  return 0;
}

}  // namespace genie

int main(int count, char** words) { return genie::run({words + 1, words + count}); }
