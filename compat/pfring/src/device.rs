//! Device names as PF_RING writes them: `eth1`, `eth1@2`, `eth1,eth2`, `eth1@0,2-4`; and after all
//! of it the group that the ring joins: `eth1/ids`.

use vnplug::split_group;

/// One port to be: a device as the daemon names it, with `@QUEUE` if it is a single queue.
pub(crate) type Target = String;

/// The ports that a PF_RING device name asks for; `None` if it is no such name, or one with a group.
///
/// Devices are joined by `,` or `;`. What stands behind `@` are queues, of all devices: numbers and
/// ranges, joined by `,`. A leading `vnplug:` is dropped, `host:` is kept (the daemon knows it).
pub(crate) fn targets(name: &str) -> Option<Vec<Target>> {
    let (devices, queues) = match name.split_once('@') {
        Some((devices, queues)) => (devices, Some(queue_list(queues)?)),
        None => (name, None),
    };
    let mut targets = Vec::new();
    for device in devices.split([',', ';']).map(plain) {
        if device.is_empty() || device == "host:" || is_grouped(device) {
            return None;
        }
        match &queues {
            None => targets.push(device.to_owned()),
            Some(queues) => targets.extend(queues.iter().map(|queue| format!("{device}@{queue}"))),
        }
    }
    (targets.len() <= MAX_TARGETS).then_some(targets)
}

/// The targets of `name` restricted to the queues whose bits are set in `mask`; all bits: no
/// restriction. `None` if no queue that the device has is left.
pub(crate) fn with_mask(name: &str, mask: u64, queue_count: u32) -> Option<Vec<Target>> {
    let (devices, _group) = split_group(name);
    let (devices, _) = devices.split_once('@').unwrap_or((devices, ""));
    if mask == u64::MAX {
        return targets(devices);
    }
    let queues = (0..queue_count.min(u64::BITS)).filter(|queue| mask >> queue & 1 == 1);
    let list: Vec<String> = queues.map(|queue| queue.to_string()).collect();
    if list.is_empty() {
        return None;
    }
    targets(&format!("{devices}@{}", list.join(",")))
}

/// Whether a device's name is one with a group, or none at all.
fn is_grouped(device: &str) -> bool {
    let (plain, group) = split_group(device);
    !group.is_empty() || plain.ends_with('/')
}

/// The device of a target, without its queue and without `host:`.
pub(crate) fn bare(target: &str) -> &str {
    let device = target.split_once('@').map_or(target, |(device, _)| device);
    device.strip_prefix("host:").unwrap_or(device)
}

fn plain(device: &str) -> &str {
    let device = device.trim();
    device.strip_prefix("vnplug:").unwrap_or(device)
}

fn queue_list(text: &str) -> Option<Vec<u32>> {
    let mut queues = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= MAX_QUEUES {
            return None;
        }
        queues.extend(first..=last);
    }
    queues.sort_unstable();
    queues.dedup();
    Some(queues)
}

/// `MAX_NUM_RX_CHANNELS`.
pub(crate) const MAX_QUEUES: u32 = 64;
/// Ports behind one ring at most.
const MAX_TARGETS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn is(name: &str, expected: &[&str]) {
        let found = targets(name).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(found, expected, "{name}");
    }

    #[test]
    fn devices_and_queues_multiply() {
        is("eth1", &["eth1"]);
        is("host:eth1@2", &["host:eth1@2"]);
        is("vnplug:eth1", &["eth1"]);
        is("eth1,eth2;eth3", &["eth1", "eth2", "eth3"]);
        is("eth1@0,2-4", &["eth1@0", "eth1@2", "eth1@3", "eth1@4"]);
        is("eth1,host:eth2@1,1", &["eth1@1", "host:eth2@1"]);
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for name in [
            "", ",", "eth1,", "eth1@", "eth1@x", "eth1@3-1", "eth1@64", "host:", "a@0-63,x", "a/g",
            "a@1/g", "a/",
        ] {
            assert_eq!(targets(name), None, "{name}");
        }
        assert_eq!(targets(&"e,".repeat(100)), None);
    }

    #[test]
    fn the_group_stands_behind_all_devices_and_queues() {
        let both = targets("eth1,lan0/port3").unwrap();
        assert_eq!(both, ["eth1", "lan0/port3"]);
        assert_eq!(with_mask("eth1@7/ids", 0b10, 4).unwrap(), ["eth1@1"]);
    }

    #[test]
    fn a_mask_chooses_among_the_queues_there_are() {
        assert_eq!(with_mask("eth1@7", u64::MAX, 4).unwrap(), ["eth1"]);
        assert_eq!(with_mask("eth1", 0b1010, 4).unwrap(), ["eth1@1", "eth1@3"]);
        assert_eq!(with_mask("eth1", 0b1_0000, 4), None);
        assert_eq!(with_mask("eth1", 0, 4), None);
    }

    #[test]
    fn the_bare_name_is_the_interface() {
        assert_eq!(bare("host:eth1@2"), "eth1");
        assert_eq!(bare("eth1"), "eth1");
    }
}
