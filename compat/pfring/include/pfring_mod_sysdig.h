/*
 * pfring_mod_sysdig.h: lets programs compile that also know PF_RING's sysdig module. vNPlug has no
 * such source: no device delivers these events. vNPlug's own text.
 */
#ifndef _PFRING_MOD_SYSDIG_H_
#define _PFRING_MOD_SYSDIG_H_

#include "pfring.h"

#pragma pack(push, 1)
struct sysdig_event_header {
    u_int64_t ts;
    u_int64_t thread_id;
    u_int32_t event_len;
    u_int16_t event_type;
};
#pragma pack(pop)

/* No event has a name here. */
static inline const char *sysdig_event2name(int event_type)
{
    (void)event_type;
    return "unknown";
}

#endif
