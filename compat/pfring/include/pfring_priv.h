/*
 * pfring_priv.h: a few macros that PF_RING's example programs take from a header of this name.
 * vNPlug's own text; nothing in the API needs it.
 */
#ifndef _PFRING_PRIV_H_
#define _PFRING_PRIV_H_

#ifndef likely
#define likely(condition) __builtin_expect((condition), 1)
#endif
#ifndef unlikely
#define unlikely(condition) __builtin_expect((condition), 0)
#endif
#ifndef min
#define min(a, b) ((a) <= (b) ? (a) : (b))
#endif
#ifndef gcc_mb
#define gcc_mb() __asm__ __volatile__("" ::: "memory")
#endif
#ifndef smp_rmb
#define smp_rmb() __sync_synchronize()
#endif
#ifndef smp_wmb
#define smp_wmb() __sync_synchronize()
#endif
#ifndef prefetch
#define prefetch(address) __builtin_prefetch((const void *)(address))
#endif

#endif
