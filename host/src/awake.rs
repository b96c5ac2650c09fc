//! CPUs that wake at once, for as long as somebody may have to be woken.
//!
//! A reader that sleeps leaves its CPU idle, and an idle CPU halts: to wake it takes an interrupt, and
//! under a hypervisor an exit on either side of it, 40 us and more. The kernel's PM QoS has a remedy
//! that an operator can afford where latency counts: no CPU enters an idle state that takes longer to
//! leave than it is told. It holds for the whole host and costs power, so it is asked for
//! ([`Config::wake_us`](crate::config::Config::wake_us)), and held while there are ports and no longer.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// The kernel's device. A wish ends with the descriptor, so also when the daemon is killed.
const DEVICE: &str = "/dev/cpu_dma_latency";
/// No wish: `PM_QOS_CPU_LATENCY_DEFAULT_VALUE` of Linux.
const NO_WISH_US: i32 = 2_000_000_000;

/// The operator's wish.
#[derive(Debug)]
pub(crate) struct Awake {
    device: File,
    wake_us: i32,
    held: bool,
}

impl Awake {
    /// Prepares it, which needs root; nothing is held yet.
    ///
    /// # Errors
    /// The system's, with the device's name.
    pub(crate) fn open(wake_us: u32) -> io::Result<Self> {
        Self::at(Path::new(DEVICE), wake_us)
            .map_err(|error| io::Error::new(error.kind(), format!("{DEVICE}: {error}")))
    }

    fn at(device: &Path, wake_us: u32) -> io::Result<Self> {
        let mut device = File::options().write(true).open(device)?;
        // What cannot be told is noticed now.
        device.write_all(&NO_WISH_US.to_ne_bytes())?;
        Ok(Self {
            device,
            wake_us: i32::try_from(wake_us).unwrap_or(NO_WISH_US),
            held: false,
        })
    }

    /// Holds the CPUs, or lets them go.
    pub(crate) fn hold(&mut self, wanted: bool) {
        if wanted == self.held {
            return;
        }
        let wish = if wanted { self.wake_us } else { NO_WISH_US };
        match self.device.write_all(&wish.to_ne_bytes()) {
            Ok(()) => log::debug!(target: "control", "CPUs wake within {wish} us"),
            Err(error) => log::warn!(target: "control", "{DEVICE}: {error}"),
        }
        // Once for each change, whatever came of it.
        self.held = wanted;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wish_is_told_once_and_taken_back() {
        let name = format!("vnplugd-awake-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, "").unwrap();
        let mut awake = Awake::at(&path, 7).unwrap();
        for wanted in [false, true, true, false, false] {
            awake.hold(wanted);
        }
        let told = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let told: Vec<i32> = told
            .chunks(4)
            .map(|wish| i32::from_ne_bytes(wish.try_into().unwrap()))
            .collect();
        assert_eq!(told, [NO_WISH_US, 7, NO_WISH_US]);
    }
}
