// Counts the instructions that an emulated program executes and the bytes that it loads: a plug-in of QEMU.
//
// The program divides itself into sections: each call of getppid() ends one. For each, stderr gets a line "section
// INSTRUCTIONS BYTES", and a line "block ADDRESS INSTRUCTIONS TIMES" for each block of code that took much of it. QEMU
// translates code in blocks, which end with a jump at the latest. With the argument "loads=off", which makes it faster,
// bytes are 0.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>

// The part of QEMU's interface that is used here, in version 1 (QEMU 4.2 to 8.2). Packages of QEMU have no header of it.
extern "C" {
struct qemu_plugin_tb;
struct qemu_plugin_insn;
using Executed = void (*)(unsigned cpu, void* data);
using Accessed = void (*)(unsigned cpu, uint32_t access, uint64_t address, void* data);
using Called = void (*)(uint64_t id, unsigned cpu, int64_t number, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                        uint64_t, uint64_t);
enum { NO_REGISTERS = 0, LOADS_AND_STORES = 3 };
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*)(uint64_t id, qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_cb(qemu_plugin_tb*, Executed, int registers, void* data);
void qemu_plugin_register_vcpu_mem_cb(qemu_plugin_insn*, Accessed, int registers, int kind, void* data);
void qemu_plugin_register_vcpu_syscall_cb(uint64_t id, Called);
size_t qemu_plugin_tb_n_insns(const qemu_plugin_tb*);
uint64_t qemu_plugin_tb_vaddr(const qemu_plugin_tb*);
qemu_plugin_insn* qemu_plugin_tb_get_insn(const qemu_plugin_tb*, size_t);
unsigned qemu_plugin_mem_size_shift(uint32_t access);
bool qemu_plugin_mem_is_store(uint32_t access);

[[gnu::visibility("default")]] extern const int qemu_plugin_version = 1;
[[gnu::visibility("default")]] int qemu_plugin_install(uint64_t id, const void* info, int argc, char** argv);
}

namespace {

constexpr int64_t GETPPID = 173;  // on aarch64
constexpr uint64_t LEAST_SHARE = 200;  // A block is listed if it has this part of the section's instructions.

struct Block {
  uint64_t address, instructions, times = 0;
};

std::mutex mutex;
std::deque<Block> blocks;  // which QEMU's code points to
uint64_t bytes = 0;
bool counts_loads = true;

void executed(unsigned, void* block) { __atomic_fetch_add(&static_cast<Block*>(block)->times, 1, __ATOMIC_RELAXED); }

// QEMU 7.2 calls nothing for most loads if it is asked for loads alone.
void accessed(unsigned, uint32_t access, uint64_t, void*) {
  if (qemu_plugin_mem_is_store(access)) return;
  __atomic_fetch_add(&bytes, uint64_t(1) << qemu_plugin_mem_size_shift(access), __ATOMIC_RELAXED);
}

void translated(uint64_t, qemu_plugin_tb* code) {
  const size_t count = qemu_plugin_tb_n_insns(code);
  const std::lock_guard lock(mutex);
  Block& block = blocks.emplace_back(Block{qemu_plugin_tb_vaddr(code), count});
  qemu_plugin_register_vcpu_tb_exec_cb(code, executed, NO_REGISTERS, &block);
  for (size_t i = 0; counts_loads && i < count; i++)
    qemu_plugin_register_vcpu_mem_cb(qemu_plugin_tb_get_insn(code, i), accessed, NO_REGISTERS, LOADS_AND_STORES, nullptr);
}

void called(uint64_t, unsigned, int64_t number, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
  if (number != GETPPID) return;
  const std::lock_guard lock(mutex);
  uint64_t instructions = 0;
  for (const Block& block : blocks) instructions += block.instructions * block.times;
  std::fprintf(stderr, "section %lu %lu\n", (unsigned long)instructions, (unsigned long)bytes);
  for (Block& block : blocks) {
    if (block.instructions * block.times * LEAST_SHARE > instructions)
      std::fprintf(stderr, "block %lx %lu %lu\n", (unsigned long)block.address, (unsigned long)block.instructions,
                   (unsigned long)block.times);
    block.times = 0;
  }
  bytes = 0;
}

}  // namespace

int qemu_plugin_install(uint64_t id, const void*, int count, char** arguments) {
  for (int i = 0; i < count; i++)
    if (!std::strcmp(arguments[i], "loads=off")) counts_loads = false;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_vcpu_syscall_cb(id, called);
  return 0;
}
