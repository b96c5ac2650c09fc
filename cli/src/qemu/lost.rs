//! Memory in a QEMU that the daemon has given up meanwhile.

use std::path::Path;

use serde_json::json;
use vnplug_ring::control::VmReady;

use super::attach::Attach;
use super::monitor::{Monitor, MonitorError};
use super::parts::{Kind, Part};
use super::pmem::Memory;
use crate::failure::Failure;

impl Attach {
    /// Whether memory that is plugged is of a file that is no more: the daemon forgot the VM meanwhile, for its guest
    /// did not let go, or the machine came here after its move was given up.
    ///
    /// # Errors
    /// [`Failure`] if it is of another file that is there, which another daemon may serve; or cannot be unplugged.
    pub(super) fn has_lost_memory(
        &self,
        monitor: &mut dyn Monitor,
        parts: &[Part],
        present: &[String],
        ready: &VmReady,
    ) -> Result<bool, Failure> {
        let arenas = ready.arenas.iter().map(|(path, len)| (path.as_str(), *len));
        let memory = std::iter::once((ready.pool_path.as_str(), ready.pool_len)).chain(arenas);
        let objects = parts.iter().filter(|part| part.kind == Kind::Object);
        let mut is_lost = false;
        for (part, (path, len)) in objects.zip(memory) {
            if !present.contains(&part.id) {
                continue;
            }
            let (its_path, its_len) = memory_of(monitor, part)?;
            if its_path == path && its_len == len {
                continue;
            }
            let is_gone = matches!(Path::new(&its_path).try_exists(), Ok(false));
            if !is_gone || self.memory == Memory::Pmem {
                return Err(Failure::new(format!(
                    "this QEMU has the memory {its_path} ({its_len} bytes), the daemon now has {path} ({len} bytes); \
                     run `vnplug detach qemu` first, then attach again"
                )));
            }
            is_lost = true;
        }
        Ok(is_lost)
    }
}

/// The file of a piece of memory, as QEMU was told, and its length. The daemon gives no two files the same name.
fn memory_of(monitor: &mut dyn Monitor, memory: &Part) -> Result<(String, u64), MonitorError> {
    let mut get = |property| {
        let path = format!("/objects/{}", memory.id);
        monitor.execute("qom-get", json!({"path": path, "property": property}))
    };
    let (path, size) = (get("mem-path")?, get("size")?);
    let path = path.as_str().unwrap_or_default().to_owned();
    Ok((path, size.as_u64().unwrap_or_default()))
}
