//! Memory that a VM gets while it runs. An operator's process, which holds QEMU's monitor, plugs devices for
//! the daemon as long as its connection lasts: the daemon itself speaks to no QEMU.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use vnplug_os::memory::Exported;
use vnplug_ring::control::grow::PLUGGED_OFFSET;

use super::RegionWish;
use super::channel::End;
use crate::control::waiting::Whom;

/// How long a process may take to plug a device: QEMU answers in milliseconds, unless it is stopped.
/// Shorter than the library waits for an answer.
const PLUGS: Duration = Duration::from_secs(8);
/// Smallest device: QEMU wants a power of two, and the first page is the daemon's.
const SMALLEST: u64 = 8192;

/// Who plugs for whom, and what.
#[derive(Default)]
pub(super) struct Growth {
    pluggers: HashMap<String, Plugger>,
    devices: BTreeMap<u32, Device>,
    last: u32,
}

/// The process that plugs for a VM.
#[derive(Debug, Clone, Copy)]
struct Plugger {
    token: u64,
    most: u64,
}

/// A device that is plugged, or on its way.
struct Device {
    vm: String,
    token: u64,
    len: u64,
    /// Who waits for it, and until when.
    wanted: Option<(Wanted, Instant)>,
    /// Nobody waits for it any more.
    late: bool,
}

/// A back-end that waits for its memory.
pub(super) struct Wanted {
    pub(super) whom: Whom,
    pub(super) end: End,
    pub(super) wish: RegionWish,
    pub(super) made: Exported,
    /// The number in the first page.
    pub(super) memory: u64,
}

/// Bytes of the device for so much shared memory.
pub(super) fn device_len(len: u64) -> u64 {
    let with_page = len.saturating_add(PLUGGED_OFFSET);
    with_page
        .checked_next_power_of_two()
        .unwrap_or(u64::MAX)
        .max(SMALLEST)
}

impl Growth {
    /// This process plugs for a VM from now on.
    pub(super) fn offer(&mut self, vm: &str, token: u64, most: u64) {
        self.pluggers.insert(vm.to_owned(), Plugger { token, most });
    }

    /// Whether somebody plugs for a VM.
    pub(super) fn is_for(&self, vm: &str) -> bool {
        self.pluggers.contains_key(vm)
    }

    /// Bytes that more may be plugged for a VM.
    pub(super) fn left(&self, vm: &str) -> u64 {
        let used = self.devices.values().filter(|it| it.vm == vm);
        let used: u64 = used.map(|it| it.len).sum();
        let most = self.pluggers.get(vm).map_or(0, |it| it.most);
        most.saturating_sub(used)
    }

    /// Notes a device that is to be plugged: its number, and whom to tell.
    pub(super) fn begin(&mut self, vm: &str, len: u64, wanted: Wanted) -> Option<(u32, u64)> {
        // Others may have asked while the memory was made.
        let token = self.pluggers.get(vm)?.token;
        if len > self.left(vm) {
            return None;
        }
        loop {
            self.last = self.last.checked_add(1).unwrap_or(1);
            if !self.devices.contains_key(&self.last) {
                break;
            }
        }
        let device = Device {
            vm: vm.to_owned(),
            token,
            len,
            wanted: Some((wanted, Instant::now() + PLUGS)),
            late: false,
        };
        self.devices.insert(self.last, device);
        Some((self.last, token))
    }

    /// The plugger of a device says that it is there, or why not: who waited for it, and its VM.
    pub(super) fn plugged(
        &mut self,
        token: u64,
        number: u32,
        there: bool,
    ) -> Option<(String, Wanted)> {
        let device = self.devices.get_mut(&number)?;
        if device.token != token {
            return None;
        }
        let (wanted, _) = device.wanted.take()?;
        let vm = device.vm.clone();
        if !there {
            self.devices.remove(&number);
        }
        Some((vm, wanted))
    }

    /// Whom to tell that nobody uses a device any more.
    pub(super) fn end(&self, number: u32) -> Option<u64> {
        self.devices.get(&number).map(|it| it.token)
    }

    /// A device is gone, says who plugged it.
    pub(super) fn unplugged(&mut self, token: u64, number: u32) {
        if self
            .devices
            .get(&number)
            .is_some_and(|it| it.token == token)
        {
            self.devices.remove(&number);
        }
    }

    /// A connection is gone: who waited for it to plug something.
    pub(super) fn gone(&mut self, token: u64) -> Vec<Wanted> {
        self.pluggers.retain(|_, it| it.token != token);
        let gone = self.devices.extract_if(.., |_, it| it.token == token);
        gone.filter_map(|(_, it)| it.wanted)
            .map(|(wanted, _)| wanted)
            .collect()
    }

    /// Who has waited too long. The device may still come: it is taken out then.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<Wanted> {
        let late = self.devices.values_mut().filter_map(|it| {
            let late = it.wanted.as_ref().is_some_and(|(_, until)| *until <= now);
            it.late |= late;
            late.then(|| it.wanted.take()).flatten()
        });
        late.map(|(wanted, _)| wanted).collect()
    }

    /// How soon one has waited too long.
    pub(super) fn look_again(&self, now: Instant) -> Option<Duration> {
        let until = self.devices.values().filter_map(|it| it.wanted.as_ref());
        until
            .map(|(_, until)| until.saturating_duration_since(now))
            .min()
    }

    /// Whether a device is this process', and nobody waits for it any more.
    pub(super) fn is_late(&self, token: u64, number: u32) -> bool {
        let device = self.devices.get(&number);
        device.is_some_and(|it| it.token == token && it.late)
    }

    /// A VM is detached: who plugged for it, to be told to take all back.
    pub(super) fn detached(&mut self, vm: &str) -> Vec<(u64, u32)> {
        self.pluggers.remove(vm);
        let own = self.devices.iter().filter(|(_, it)| it.vm == vm);
        own.map(|(number, it)| (it.token, *number)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_holds_what_is_shared_and_a_page() {
        assert_eq!(device_len(1), 8192);
        assert_eq!(device_len(4096), 8192);
        assert_eq!(device_len(1 << 20), 1 << 21);
        assert_eq!(device_len(u64::MAX), u64::MAX);
    }
}
