//! What attaching has in common for all kinds of virtual machine.

use clap::{Args, Subcommand};
use vnplug::Client;
use vnplug_ring::control::{Grant, HOST_PREFIX, code};
use vnplug_ring::pool::MAX_NAME;

use crate::failure::{Failure, Outcome};
use crate::{qemu, text, uml};

/// Kinds of virtual machine to attach.
#[derive(Debug, Subcommand)]
pub(crate) enum Attach {
    /// A running QEMU, by hot-plug over its monitor socket
    Qemu(Box<qemu::Attach>),
    /// A User-mode Linux, which is started by this command
    Uml(uml::Attach),
}

/// Kinds of virtual machine to detach.
#[derive(Debug, Subcommand)]
pub(crate) enum Detach {
    /// A running QEMU, by hot-unplug over its monitor socket
    Qemu(qemu::Detach),
    /// A User-mode Linux; it keeps running without its channel
    Uml(uml::Detach),
}

/// Kinds of virtual machine to move.
#[derive(Debug, Subcommand)]
pub(crate) enum Migrate {
    /// A running QEMU, to another QEMU that waits for it
    Qemu(Box<qemu::Migrate>),
}

/// Options of every kind.
#[derive(Debug, Clone, Args)]
pub(crate) struct VmArgs {
    /// The operator's name for the VM: 1 to 63 letters, digits, `-`, `_`, `.`
    #[arg(long, value_parser = vm_name)]
    pub(crate) name: String,
    /// Size of the VM's memory pool, from which its rings are made, for example 64M; a power of two.
    /// Default: the daemon's
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true,
          value_parser = pool_size)]
    pub(crate) pool: u64,
    /// A source the VM may see, with a filter that always applies; may be repeated, `*` means all.
    /// Added to what the daemon's configuration allows
    #[arg(long, value_name = "SOURCE[:FILTER]", value_parser = grant)]
    pub(crate) allow: Vec<Grant>,
}

impl Attach {
    pub(crate) fn run(self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        match self {
            Self::Qemu(attach) => attach.run(connect),
            Self::Uml(attach) => attach.run(connect),
        }
    }
}

impl Detach {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        match self {
            Self::Qemu(detach) => detach.run(connect),
            Self::Uml(detach) => detach.run(connect),
        }
    }
}

impl Migrate {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let Self::Qemu(migrate) = self;
        migrate.run(connect)
    }
}

/// Makes the daemon forget a VM if it is still `owner`'s (0: anyone's); false if it did not know it.
pub(crate) fn forget(client: &mut Client, name: &str, owner: u64) -> Result<bool, Failure> {
    match client.detach_own_vm(name, owner) {
        Ok(()) => Ok(true),
        Err(vnplug::Error::Refused { code, .. }) if code == code::NOT_FOUND => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Parses a VM's name. QEMU's ids take the same characters.
pub(crate) fn vm_name(text: &str) -> Result<String, String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if text.is_empty() || text.len() > MAX_NAME || !text.chars().all(good) {
        return Err(format!(
            "a name is 1 to {MAX_NAME} letters, digits, `-`, `_` or `.`"
        ));
    }
    Ok(text.to_owned())
}

fn pool_size(text: &str) -> Result<u64, String> {
    let bytes = text::size(text)?;
    if bytes != 0 && (!bytes.is_power_of_two() || bytes < 1 << 20) {
        return Err("a pool is a power of two of at least 1M, for example 64M".into());
    }
    Ok(bytes)
}

fn grant(text: &str) -> Result<Grant, String> {
    let name = text.strip_prefix(HOST_PREFIX).unwrap_or(text);
    let (source, filter) = name.split_once(':').unwrap_or((name, ""));
    if source.is_empty() {
        return Err("write SOURCE or SOURCE:FILTER, for example 'eth1:not port 22'".into());
    }
    Ok(Grant {
        source: source.to_owned(),
        filter: filter.trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_qemu_and_the_pool_page_take() {
        for good in ["a", "probe-1", "x.y_z", &"n".repeat(63)] {
            assert!(vm_name(good).is_ok(), "{good}");
        }
        for bad in ["", "a b", "a/b", "ä", "a,b", &"n".repeat(64)] {
            assert!(vm_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn pools_are_powers_of_two() {
        assert_eq!(pool_size("64M"), Ok(64 << 20));
        assert_eq!(pool_size("0"), Ok(0));
        assert!(pool_size("65M").is_err() && pool_size("4096").is_err());
    }

    #[test]
    fn a_grant_is_a_source_and_perhaps_a_filter() {
        let make = |source: &str, filter: &str| Grant {
            source: source.into(),
            filter: filter.into(),
        };
        assert_eq!(grant("*"), Ok(make("*", "")));
        assert_eq!(grant("host:eth1"), Ok(make("eth1", "")));
        assert_eq!(
            grant("host:eth1:ip[2:2] = 40"),
            Ok(make("eth1", "ip[2:2] = 40"))
        );
        assert!(grant(":tcp").is_err());
    }
}
