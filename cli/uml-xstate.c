/*
 * Lets User-mode Linux run on processors with AMX (LD_PRELOAD).
 *
 * UML keeps its processes' extended state in 2696 bytes (all up to AVX-512 and PKRU) and writes it
 * back with PTRACE_SETREGSET. A host whose state is larger (AMX tiles: about 11 kB) refuses a
 * short write with EFAULT, and the guest's init dies ("ptrace set fp regs failed, errno = 14").
 * Here a short write is filled up to the host's size; the components beyond UML's knowledge are
 * put into their initial state. UML calls ptrace from one thread only.
 */
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
	PEEK_FIRST = 1, PEEK_LAST = 3,          /* linux/ptrace.h: PTRACE_PEEK{TEXT,DATA,USER} */
	GETREGSET = 0x4204, SETREGSET = 0x4205,
	NT_X86_XSTATE = 0x202,                  /* linux/elf.h */
	XSTATE_BV = 512,                        /* Intel SDM vol. 1, 13.4.2: first header word */
};

/* Components 0-9: x87 .. AVX-512, PT, PKRU. The rest lies beyond UML's 2696 bytes. */
static const unsigned long known_components = 0x3ff;

static char full[65536] __attribute__((aligned(64)));
static size_t host_len;

long ptrace(int request, int pid, void *addr, void *data)
{
	if (request >= PEEK_FIRST && request <= PEEK_LAST) {
		/* The system call stores the word; the C library returns it. */
		long word = 0;
		long status = syscall(SYS_ptrace, request, pid, addr, &word);
		return status < 0 ? status : word;
	}
	if (request == SETREGSET && (long)addr == NT_X86_XSTATE) {
		struct iovec *given = data;
		if (!host_len) {
			struct iovec all = { full, sizeof full };
			if (syscall(SYS_ptrace, GETREGSET, pid, addr, &all) == 0)
				host_len = all.iov_len;
			memset(full, 0, sizeof full);
		}
		if (given->iov_len > XSTATE_BV + 8 && given->iov_len < host_len) {
			struct iovec all = { full, host_len };
			unsigned long components;
			memcpy(full, given->iov_base, given->iov_len);
			memcpy(&components, full + XSTATE_BV, sizeof components);
			components &= known_components;
			memcpy(full + XSTATE_BV, &components, sizeof components);
			return syscall(SYS_ptrace, request, pid, addr, &all);
		}
	}
	return syscall(SYS_ptrace, request, pid, addr, data);
}
