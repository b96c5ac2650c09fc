//! Memory that a VM gets while it runs. An operator's process, which holds QEMU's monitor, plugs devices for
//! the daemon as long as its connection lasts: the daemon itself speaks to no QEMU.
//!
//! | a device of | is taken out when |
//! |---|---|
//! | a back-end | its program let go, or did not in time and it was emptied |
//! | a port or a group's arenas | it is closed, and the agent says that no program maps it; or a new agent does not know of it, for ten seconds |
//! | nobody here: an earlier daemon's | ten seconds after who plugs told of it |
//!
//! It counts towards what may be plugged until the guest has let go of it.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use vnplug_os::event;
use vnplug_os::memory::Exported;
use vnplug_ring::control::grow::PLUGGED_OFFSET;

use super::ports::{Growing, Part};
use super::regions::Plugging;
use crate::control::waiting::Whom;

/// How long a process may take to plug a device: QEMU answers in milliseconds, unless it is stopped.
/// Shorter than the library waits for an answer.
const PLUGS: Duration = Duration::from_secs(8);
/// How long a back-end waits for an answer: after that it is answered before the device is there, and told if
/// it does not come. Its other programs do not wait for a guest that is slow.
const QUICK: Duration = Duration::from_millis(200);
/// How long a device stays of which nobody says whether a program maps it.
pub(super) const LINGERS: Duration = Duration::from_secs(10);
/// Smallest device: QEMU wants a power of two, and the first page is the daemon's.
const SMALLEST: u64 = 8192;
/// Devices of one VM: more than a machine has places for.
const MAX_DEVICES: usize = 64;

/// Who plugs for whom, and what.
pub(super) struct Growth {
    pluggers: HashMap<String, Plugger>,
    devices: BTreeMap<u32, Device>,
    /// Memory of devices that nobody uses any more: it is given back elsewhere.
    unused: Vec<Exported>,
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
    /// Who plugged it; `None`: that process is gone, and the device still there.
    token: Option<u64>,
    len: u64,
    /// Who waits for it, and until when.
    wanted: Option<(Wanted, Instant)>,
    /// Nobody waits for it any more.
    late: bool,
    /// A back-end has it otherwise.
    port: Option<PortDevice>,
}

/// What a device is to a port, or was.
struct PortDevice {
    /// Who asked for the port.
    whom: Whom,
    part: Part,
    /// The number by which the guest's agent names it.
    memory: u64,
    /// None of one that an earlier daemon made.
    made: Option<Exported>,
    stage: Stage,
    /// No program maps it, says the agent.
    released: bool,
    /// Then it goes, whoever maps it.
    until: Option<Instant>,
    /// The guest let go of it by itself.
    gone: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The port is not opened yet.
    Opening,
    Open,
    Closed,
}

/// Who waits for a device.
pub(super) enum Wanted {
    /// A back-end.
    Region(Plugging),
    /// A port that is opened.
    Port(Whom, Box<Growing>),
}

/// Bytes of the device for this much memory behind its first page.
pub(super) fn device_len(len: u64) -> u64 {
    let with_page = len.saturating_add(PLUGGED_OFFSET);
    with_page
        .checked_next_power_of_two()
        .unwrap_or(u64::MAX)
        .max(SMALLEST)
}

impl Growth {
    /// Nobody plugs yet. Numbers begin anywhere: devices of an earlier daemon may still be there.
    pub(super) fn new() -> Self {
        Self {
            pluggers: HashMap::new(),
            devices: BTreeMap::new(),
            unused: Vec::new(),
            last: event::random() as u32,
        }
    }

    /// This process plugs for a VM from now on.
    pub(super) fn offer(&mut self, vm: &str, token: u64, most: u64) {
        self.pluggers.insert(vm.to_owned(), Plugger { token, most });
    }

    /// Whether somebody plugs for a VM.
    pub(super) fn is_for(&self, vm: &str) -> bool {
        self.pluggers.contains_key(vm)
    }

    /// Devices of a VM, and their bytes.
    pub(super) fn used(&self, vm: &str) -> (usize, u64) {
        let used = self.devices.values().filter(|it| it.vm == vm);
        used.fold((0, 0), |(count, sum), it| (count + 1, sum + it.len))
    }

    /// Bytes that more may be plugged for a VM.
    pub(super) fn left(&self, vm: &str) -> u64 {
        let (devices, used) = self.used(vm);
        if devices >= MAX_DEVICES {
            return 0;
        }
        let most = self.pluggers.get(vm).map_or(0, |it| it.most);
        most.saturating_sub(used)
    }

    /// Notes a device that is to be plugged: its number, and whom to tell.
    pub(super) fn begin(&mut self, vm: &str, len: u64, wanted: Wanted) -> Option<(u32, u64)> {
        let until = Instant::now()
            + match wanted {
                Wanted::Region(_) => QUICK,
                Wanted::Port(..) => PLUGS,
            };
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
            token: Some(token),
            len,
            wanted: Some((wanted, until)),
            late: false,
            port: None,
        };
        self.devices.insert(self.last, device);
        Some((self.last, token))
    }

    /// A device that was begun is for a port.
    pub(super) fn is_for_port(
        &mut self,
        number: u32,
        whom: Whom,
        part: Part,
        (memory, made): (u64, Exported),
    ) {
        if let Some(device) = self.devices.get_mut(&number) {
            device.port = Some(PortDevice {
                whom,
                part,
                memory,
                made: Some(made),
                stage: Stage::Opening,
                released: false,
                until: None,
                gone: false,
            });
        }
    }

    /// The plugger of a device says that it is there, or why not: who waited for it, and its VM.
    pub(super) fn plugged(
        &mut self,
        token: u64,
        number: u32,
        there: bool,
    ) -> Option<(String, Wanted)> {
        let device = self.devices.get_mut(&number)?;
        if device.token != Some(token) {
            return None;
        }
        let (wanted, _) = device.wanted.take()?;
        let vm = device.vm.clone();
        if !there {
            self.remove(number);
        }
        Some((vm, wanted))
    }

    /// Who plugs tells of a device that was there before it came. True: it is to be taken out at once.
    pub(super) fn found(&mut self, token: u64, number: u32) -> bool {
        let own = self.pluggers.iter().find(|(_, it)| it.token == token);
        let Some((vm, _)) = own else {
            return false;
        };
        match self.devices.get_mut(&number) {
            // The end of who plugged it may not have been heard yet.
            Some(device)
                if device.vm == *vm && device.wanted.is_none() && device.token != Some(token) =>
            {
                device.token = Some(token);
                device.port.as_ref().is_some_and(PortDevice::is_over)
            }
            Some(_) => false,
            None => {
                let whom = Whom {
                    token: 0,
                    id: 0,
                    app: 0,
                };
                let port = PortDevice {
                    whom,
                    part: Part::Rings,
                    memory: 0,
                    made: None,
                    stage: Stage::Closed,
                    released: false,
                    until: Some(Instant::now() + LINGERS),
                    gone: false,
                };
                let device = Device {
                    vm: vm.clone(),
                    token: Some(token),
                    len: 0,
                    wanted: None,
                    late: false,
                    port: Some(port),
                };
                self.devices.insert(number, device);
                false
            }
        }
    }

    /// The port is open that these devices were for. `arenas`: its group's lie in one, of this number.
    pub(super) fn opened(&mut self, whom: Whom, rings: u64, arenas: Option<u64>) {
        for port in self.ports().filter(|it| it.is_opening_for(whom)) {
            match (port.part, arenas) {
                (Part::Rings, _) if port.memory == rings => port.stage = Stage::Open,
                (Part::Arenas, Some(memory)) => {
                    port.memory = memory;
                    port.stage = Stage::Open;
                }
                _ => {}
            }
        }
    }

    /// Ports are not opened for which devices were plugged, or are on their way: those that are to be taken out.
    pub(super) fn give_up(&mut self, whose: impl Fn(Whom) -> bool) -> Vec<u32> {
        let mut over = Vec::new();
        for (number, device) in &mut self.devices {
            let Some(port) = &mut device.port else {
                continue;
            };
            if port.stage == Stage::Opening && whose(port.whom) {
                port.stage = Stage::Closed;
                port.released = true;
                device.late = device.wanted.take().is_some() || device.late;
                if !device.late {
                    over.push(*number);
                }
            }
        }
        over
    }

    /// The port or group is closed whose memory this was: the device, if it is to be taken out.
    pub(super) fn closed(&mut self, memory: u64) -> Option<u32> {
        let (number, port) = self.of_memory(None, memory)?;
        port.stage = Stage::Closed;
        let device = self.devices.get_mut(&number)?;
        if let (None, Some(port)) = (device.token, &mut device.port) {
            // The machine may have ended, too, and nobody says that it is released.
            port.until = Some(Instant::now() + LINGERS);
        }
        self.if_over(number)
    }

    /// No program maps this memory, says the agent of a VM: the device, if it is to be taken out.
    pub(super) fn released(&mut self, vm: &str, memory: u64) -> Option<u32> {
        let (number, port) = self.of_memory(Some(vm), memory)?;
        port.released = true;
        self.if_over(number)
    }

    /// An agent came that knows of this memory alone. What else there is of closed ports goes some time later:
    /// programs of an earlier agent may map it.
    pub(super) fn named(&mut self, vm: &str, memories: &[u64]) {
        let until = Instant::now() + LINGERS;
        let own = self.devices.values_mut().filter(|it| it.vm == vm);
        for port in own.filter_map(|it| it.port.as_mut()) {
            let is_known = memories.contains(&port.memory);
            if port.stage == Stage::Closed && !is_known && port.until.is_none() {
                port.until = Some(until);
            }
        }
    }

    /// Whom to tell that nobody uses a device any more. Its memory is [unused](Self::take_unused).
    pub(super) fn end(&mut self, number: u32) -> Option<u64> {
        let device = self.devices.get_mut(&number)?;
        if device.wanted.take().is_some() {
            // It is taken out when it is there.
            device.late = true;
            return None;
        }
        if let Some(port) = &mut device.port {
            port.until = None;
            self.unused.extend(port.made.take());
        }
        match device.token {
            Some(token) => Some(token),
            None => {
                self.remove(number);
                None
            }
        }
    }

    /// Memory that is to be given back. It is emptied by that, and may be much.
    pub(super) fn take_unused(&mut self) -> Vec<Exported> {
        std::mem::take(&mut self.unused)
    }

    fn remove(&mut self, number: u32) -> Option<Device> {
        let mut device = self.devices.remove(&number)?;
        let made = device.port.as_mut().and_then(|port| port.made.take());
        self.unused.extend(made);
        Some(device)
    }

    /// A device is gone, says who plugged it. Who still waited for it.
    pub(super) fn unplugged(&mut self, token: u64, number: u32) -> Option<Wanted> {
        let device = self.devices.get_mut(&number)?;
        if device.token != Some(token) {
            return None;
        }
        if let Some(port) = &mut device.port
            && port.stage != Stage::Closed
            && device.wanted.is_none()
        {
            // The guest's doing. The memory is still the port's, and counted.
            port.gone = true;
            return None;
        }
        let device = self.remove(number)?;
        device.wanted.map(|(wanted, _)| wanted)
    }

    /// A connection is gone: who waited for it to plug something.
    pub(super) fn gone(&mut self, token: u64) -> Vec<Wanted> {
        self.pluggers.retain(|_, it| it.token != token);
        let mut waited = Vec::new();
        self.devices.retain(|_, device| {
            if device.token != Some(token) {
                return true;
            }
            device.token = None;
            let is_awaited = device.wanted.is_some();
            waited.extend(device.wanted.take().map(|(wanted, _)| wanted));
            // What is used goes on: QEMU has the memory, and the next process takes it out.
            let port = device.port.as_mut();
            let is_used = port.as_ref().is_none_or(|it| it.stage != Stage::Closed);
            let stays = is_used && !is_awaited && !device.late;
            if !stays {
                self.unused.extend(port.and_then(|port| port.made.take()));
            }
            stays
        });
        waited
    }

    /// Who has waited too long, and for which device.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<(u32, Wanted)> {
        let late = self.devices.iter_mut().filter_map(|(number, it)| {
            let wanted = it.wanted.take_if(|(_, until)| *until <= now);
            wanted.map(|(wanted, _)| (*number, wanted))
        });
        late.collect()
    }

    /// Somebody waits for a device some more.
    pub(super) fn wait_more(&mut self, number: u32, wanted: Wanted) {
        if let Some(device) = self.devices.get_mut(&number) {
            device.wanted = Some((wanted, Instant::now() + PLUGS));
        }
    }

    /// Nobody waits for a device any more. If it still comes, it is taken out.
    pub(super) fn is_too_late(&mut self, number: u32) {
        if let Some(device) = self.devices.get_mut(&number) {
            device.late = true;
        }
    }

    /// Whether a device is not there yet.
    pub(super) fn is_coming(&self, number: u32) -> bool {
        let device = self.devices.get(&number);
        device.is_some_and(|it| it.wanted.is_some())
    }

    /// Devices that have stayed long enough.
    pub(super) fn lingered(&self, now: Instant) -> Vec<u32> {
        let until = |it: &Device| it.port.as_ref().and_then(|port| port.until);
        let over = self.devices.iter();
        let over = over.filter(|(_, it)| until(it).is_some_and(|until| until <= now));
        over.map(|(number, _)| *number).collect()
    }

    /// How soon one has waited too long, or stayed long enough.
    pub(super) fn look_again(&self, now: Instant) -> Option<Duration> {
        if !self.unused.is_empty() {
            return Some(Duration::ZERO);
        }
        let until = self.devices.values().flat_map(|it| {
            let wanted = it.wanted.as_ref().map(|(_, until)| *until);
            [wanted, it.port.as_ref().and_then(|port| port.until)]
        });
        until
            .flatten()
            .map(|until| until.saturating_duration_since(now))
            .min()
    }

    /// Whether a device is this process', and nobody waits for it any more.
    pub(super) fn is_late(&self, token: u64, number: u32) -> bool {
        let device = self.devices.get(&number);
        device.is_some_and(|it| it.token == Some(token) && it.late)
    }

    /// A VM is detached: its devices, which are to be taken out.
    pub(super) fn detached(&mut self, vm: &str) -> Vec<u32> {
        let own = self.devices.iter_mut().filter(|(_, it)| it.vm == vm);
        let own = own.map(|(number, it)| {
            if let Some(port) = &mut it.port {
                port.stage = Stage::Closed;
                port.released = true;
            }
            *number
        });
        own.collect()
    }

    /// Forgets who plugs for a VM.
    pub(super) fn forget(&mut self, vm: &str) {
        self.pluggers.remove(vm);
    }

    fn ports(&mut self) -> impl Iterator<Item = &mut PortDevice> {
        self.devices.values_mut().filter_map(|it| it.port.as_mut())
    }

    fn of_memory(&mut self, vm: Option<&str>, memory: u64) -> Option<(u32, &mut PortDevice)> {
        let own = self.devices.iter_mut();
        let own = own.filter(|(_, it)| vm.is_none_or(|vm| it.vm == vm));
        let mut ports = own.filter_map(|(number, it)| Some((*number, it.port.as_mut()?)));
        ports.find(|(_, port)| memory != 0 && port.memory == memory)
    }

    /// The device, if nobody needs it any more.
    fn if_over(&mut self, number: u32) -> Option<u32> {
        let device = self.devices.get(&number)?;
        let port = device.port.as_ref()?;
        if port.stage == Stage::Closed && port.gone {
            self.remove(number);
            return None;
        }
        port.is_over().then_some(number)
    }
}

impl PortDevice {
    fn is_opening_for(&self, whom: Whom) -> bool {
        self.stage == Stage::Opening && self.whom == whom
    }

    fn is_over(&self) -> bool {
        self.stage == Stage::Closed && self.released
    }
}
