/* How many instructions does a process execute, by library? A plugin of qemu 7.2's user mode (Debian's qemu-user), which
   writes them to $COUNTS at the end. A token takes what two numbers of tokens differ by, with one thread:

       cc -shared -fPIC benchmarks/instructions.c -o /tmp/instructions.so
       COUNTS=/tmp/8 OMP_NUM_THREADS=1 qemu-x86_64 -cpu max -plugin /tmp/instructions.so \
           $(which python) -m tswift generate --method ar --len 8 --prompt-text Once --out /tmp/x */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As qemu's header says, which Debian does not ship. */
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, void (*)(uint64_t, void *));
void qemu_plugin_register_atexit_cb(uint64_t, void (*)(uint64_t, void *), void *);
void qemu_plugin_register_vcpu_tb_exec_inline(void *, int, void *, uint64_t);
size_t qemu_plugin_tb_n_insns(const void *);
void *qemu_plugin_tb_get_insn(const void *, size_t);
void *qemu_plugin_insn_haddr(const void *);

int qemu_plugin_version = 1;

static struct {
    char name[512];
    uint64_t count;
} files[1024];
static int known;

/* The file that an address of this process is mapped from: often the last one's. */
static int file_at(uint64_t address) {
    static uint64_t first, end;
    static int file;
    char line[1024], name[512];
    if (first <= address && address < end) return file;
    FILE *maps = fopen("/proc/self/maps", "r");
    while ((address < first || address >= end) && fgets(line, sizeof line, maps)) {
        strcpy(name, "none");
        sscanf(line, "%" SCNx64 "-%" SCNx64 " %*s %*s %*s %*s %511[^\n]", &first, &end, name);
    }
    fclose(maps);
    for (file = 0; file < known && strcmp(files[file].name, name);) file++;
    if (file == known) strcpy(files[known++].name, name);
    return file;
}

static void translated(uint64_t id, void *made) {
    const int file = file_at((uint64_t)qemu_plugin_insn_haddr(qemu_plugin_tb_get_insn(made, 0)));
    qemu_plugin_register_vcpu_tb_exec_inline(made, 0, &files[file].count, qemu_plugin_tb_n_insns(made));
}

static void ended(uint64_t id, void *given) {
    FILE *to = fopen(getenv("COUNTS"), "w");
    for (int file = 0; file < known; file++) fprintf(to, "%" PRIu64 " %s\n", files[file].count, files[file].name);
    fclose(to);
}

int qemu_plugin_install(uint64_t id, const void *info, int count, char **words) {
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
