/* Counts the instructions that a program executes under QEMU's user mode (plugin interface of version 1, declared here so that no headers of
   QEMU are needed), and prints the number when it ends. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

struct qemu_plugin_tb;
typedef uint64_t Id;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
void qemu_plugin_register_vcpu_tb_trans_cb(Id, void (*)(Id, struct qemu_plugin_tb*));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, enum qemu_plugin_op, void*, uint64_t);
void qemu_plugin_register_atexit_cb(Id, void (*)(Id, void*), void*);

EXPORT int qemu_plugin_version = 1;
static uint64_t executed;

static void count_block(Id id, struct qemu_plugin_tb* block) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, &executed, qemu_plugin_tb_n_insns(block));
}

static void print_count(Id id, void* nothing) {
    (void)id, (void)nothing;
    fprintf(stderr, "%llu\n", (unsigned long long)executed);
}

EXPORT int qemu_plugin_install(Id id, const void* info, int count, char** options) {
    (void)info, (void)count, (void)options;
    qemu_plugin_register_vcpu_tb_trans_cb(id, count_block);
    qemu_plugin_register_atexit_cb(id, print_count, NULL);
    return 0;
}
