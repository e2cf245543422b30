// A mapped file that is cut short, or whose disk fails, while it is in use: the processor's fault (SIGBUS) ends the
// process with one clear line in place of "Bus error". Everything here may be called from a signal handler.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t LINE = 8192;  // a path has 4096 bytes at most, and the kernel writes some of them as four
std::atomic_flag told = ATOMIC_FLAG_INIT;
struct sigaction before;
char line[LINE];

int digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

const char* number(const char* text, uintptr_t& value) {
    for (value = 0; digit(*text) >= 0; ++text) value = value << 4 | uintptr_t(digit(*text));
    return text;
}

// The path in a line of /proc/self/maps ("from-to rwxp offset device inode   path") if it holds the address.
const char* path_if_around(const char* text, uintptr_t address) {
    uintptr_t from = 0, to = 0;
    text = number(text, from);
    if (*text++ != '-') return nullptr;
    text = number(text, to);
    if (address < from || address >= to) return nullptr;
    return std::strchr(text, '/');
}

// The name of the file that is mapped around an address, in `line`; null where there is none.
const char* file_at(uintptr_t address) {
    const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (maps < 0) return nullptr;
    const char* found = nullptr;
    size_t length = 0;
    char c = 0;
    while (!found && read(maps, &c, 1) == 1) {
        if (c != '\n') {
            if (length + 1 < LINE) line[length++] = c;
            continue;
        }
        line[length] = 0;
        length = 0;
        found = path_if_around(line, address);
    }
    close(maps);
    return found;
}

void say(const char* text) {
    size_t left = std::strlen(text);
    for (ssize_t n = 1; left && n > 0; text += n, left -= size_t(n)) n = write(STDERR_FILENO, text, left);
}

void on_bus_error(int, siginfo_t* info, void*) {
    if (told.test_and_set()) {
        for (;;) pause();  // another thread is telling and will end the process
    }
    const char* path = file_at(reinterpret_cast<uintptr_t>(info->si_addr));
    if (!path) {  // not ours to explain: the instruction faults again under the former handler
        sigaction(SIGBUS, &before, nullptr);
        told.clear();
        return;
    }
    say("tool: error: ");
    say(path);
    say(": was cut short, or cannot be read any more, while it was in use; restore the file and start again\n");
    _exit(1);
}

}  // namespace

// Explain faults in mapped files from now on, in every thread of the process. May be called again.
extern "C" __attribute__((visibility("default"))) void tk_explain_mapped_faults() {
    static std::atomic_flag installed = ATOMIC_FLAG_INIT;
    if (installed.test_and_set()) return;
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
}
