//! What is said when QEMU refuses something, or a guest does not let go.

use super::monitor::MonitorError;
use super::parts::Left;
use super::pmem::MORE_MEMORY;

/// That a guest has not let go of these, and what to do.
pub(super) fn pending(left: &Left) -> String {
    let mut text = format!(
        "the guest has not let go of {} (its system must run and support PCI hot-plug: ACPI or \
         pciehp)",
        left.devices.join(", ")
    );
    if !left.held.is_empty() {
        text += &format!("; {} stay with them", left.held.join(", "));
    }
    text + "; run `vnplug detach qemu` again later, or reset the guest"
}

/// What to do about what QEMU refused; nothing if that is not known.
pub(super) fn advice(error: &MonitorError) -> String {
    let MonitorError::Refused { text, .. } = error else {
        return String::new();
    };
    let no_memory = [
        "memory devices",
        "address space for memory device",
        "maxmem",
    ];
    if no_memory.iter().any(|part| text.contains(part)) {
        // NB: "not enough space, currently … in use of total space for memory devices".
        return format!(
            "; the machine has no room for its memory: give it more at its next start, {MORE_MEMORY}. Devices \
             of earlier attaches count until then"
        );
    }
    known_advice(text).to_owned()
}

fn known_advice(text: &str) -> &'static str {
    let has = |part| text.contains(part);
    if has("no slot/function available") {
        "; all PCI slots are taken, unplug a device or give --bus a bridge with room"
    } else if has("does not support hotplug") {
        "; give --bus a bus or port that does"
    } else if has("Permission denied") {
        "; QEMU may not open it: see --qemu-user, the permissions of the directories above, and \
         AppArmor or SELinux profiles; under libvirt, start the VM after its directory is mounted"
    } else if has("backing store") && has("No such file") {
        "; QEMU does not see it: libvirt gives each VM a /dev of its own, with what was mounted \
         under /dev when the VM started; a pool directory must be a mount of its own by then"
    } else if has("not a valid device model name") {
        "; this QEMU was built without it, install the full QEMU package"
    } else {
        ""
    }
}
