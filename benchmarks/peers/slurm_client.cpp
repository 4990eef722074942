// Requests allocations of one GPU from a Slurm controller and prints their times; built by slurm_peer.py.
//
//     slurm_client quiet JOBS GAP_S          sequential requests with a pause after each
//     slurm_client busy WORKERS SECONDS      concurrent workers allocate and release for this time
//
// The output format is that of peer_sandbox.py. It calls libslurm like salloc --no-shell, without starting a
// process for each job.

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

struct Grant {
  double at_s;
  double latency_ms;
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, slurm_strerror(slurm_get_errno()));
  std::exit(1);
}

job_desc_msg_t one_gpu() {
  static char name[] = "bench", gpu[] = "gres:gpu:1", folder[] = "/";
  job_desc_msg_t request;
  slurm_init_job_desc_msg(&request);
  request.name = name;
  request.tres_per_node = gpu;
  request.work_dir = folder;
  request.min_nodes = request.max_nodes = 1;
  request.num_tasks = request.min_cpus = 1;
  request.user_id = getuid();
  request.group_id = getgid();
  return request;
}

// Allocates, measures the time until the reply names the node, and completes the job.
Grant place() {
  auto request = one_gpu();
  const auto began = Clock::now();
  auto* response = slurm_allocate_resources_blocking(&request, kGrantTimeoutS, nullptr);
  const auto now = Clock::now();
  if (response == nullptr || response->node_list == nullptr) fail("allocation failed");
  Grant grant{std::chrono::duration<double>(now.time_since_epoch()).count(),
              std::chrono::duration<double, std::milli>(now - began).count()};
  if (slurm_complete_job(response->job_id, 0) != SLURM_SUCCESS) fail("could not complete a job");
  slurm_free_resource_allocation_response_msg(response);
  return grant;
}

std::vector<Grant> quiet(int jobs, double gap_s) {
  std::vector<Grant> all;
  for (int job = 0; job < jobs; ++job) {
    all.push_back(place());
    std::this_thread::sleep_for(std::chrono::duration<double>(gap_s));
  }
  return all;
}

std::vector<Grant> busy(int workers, double seconds) {
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  std::vector<std::vector<Grant>> by_worker(workers);
  {
    std::vector<std::jthread> threads;
    for (auto& own : by_worker)
      threads.emplace_back([&own, until] {
        while (Clock::now() < until) own.push_back(place());
      });
  }
  std::vector<Grant> all;
  for (auto& own : by_worker) all.insert(all.end(), own.begin(), own.end());
  return all;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() != 3 || (arguments[0] != "quiet" && arguments[0] != "busy")) {
    std::fputs("usage: slurm_client quiet JOBS GAP_S | busy WORKERS SECONDS\n", stderr);
    return 2;
  }
  slurm_init(nullptr);
  const auto count = std::stoi(arguments[1]);
  const auto time_s = std::stod(arguments[2]);
  std::printf("began %.6f\n", std::chrono::duration<double>(Clock::now().time_since_epoch()).count());
  for (const auto& grant : arguments[0] == "quiet" ? quiet(count, time_s) : busy(count, time_s))
    std::printf("placed %.6f %.3f\n", grant.at_s, grant.latency_ms);
  return 0;
}

}  // namespace genie

int main(int count, char** arguments) { return genie::run({arguments + 1, arguments + count}); }
