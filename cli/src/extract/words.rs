//! The words of `vnplug extract`: places, and a filter after them.

use std::path::{Path, PathBuf};

use vnplug_store::filter::Filter;

use crate::failure::{Failure, USAGE};

/// Splits the words into places and the filter: the last word is one unless it is the name of a file or a
/// directory. With `filter`, all words are places.
///
/// # Errors
/// The last word may be both, is neither, or a place is not there.
pub(crate) fn split<'a>(
    words: &'a [PathBuf],
    filter: Option<&str>,
) -> Result<(&'a [PathBuf], Filter), Failure> {
    let (places, last) = match (filter, words.split_last()) {
        (None, Some((last, places))) if !places.is_empty() => (places, Some(last)),
        _ => (words, None),
    };
    let last = last.filter(|last| match last.symlink_metadata().is_err() {
        true => true,
        false => is_filter_word(last),
    });
    let Some(last) = last else {
        return Ok((words, Filter::new(filter.unwrap_or_default())?));
    };
    let expression = last
        .to_str()
        .ok_or_else(|| Failure::new("the filter is not UTF-8"))?;
    if last.symlink_metadata().is_ok() {
        return Err(Failure::with_code(
            USAGE,
            format!(
                "`{expression}` is a filter, and a file here has that name: write `--filter '{expression}'` for the \
                 filter, or `./{expression}` for the file"
            ),
        ));
    }
    if expression.starts_with(['/', '.', '~']) {
        return Err(Failure::about(expression, MISSING));
    }
    let filter = Filter::new(expression).map_err(|error| {
        Failure::new(format!(
            "`{expression}`: {MISSING} of this name, and no filter: {error}"
        ))
    })?;
    Ok((places, filter))
}

/// All places are there.
///
/// # Errors
/// [`Failure`] if one is not.
pub(super) fn are_there(places: &[PathBuf]) -> Result<(), Failure> {
    // A segment that was packed meanwhile has another name now.
    let (_, unread) = vnplug_store::extract::captures(places);
    match unread
        .into_iter()
        .find(|(_, error)| error.kind() == std::io::ErrorKind::NotFound)
    {
        Some((place, _)) => Err(Failure::about(place.display(), MISSING)),
        None => Ok(()),
    }
}

/// Whether a word, without a directory, is what a filter begins with.
fn is_filter_word(word: &Path) -> bool {
    let first = word
        .to_str()
        .and_then(|text| text.split_whitespace().next());
    first.is_some_and(|first| FILTER_WORDS.contains(&first))
}

const MISSING: &str = "no such file or directory";
/// pcap-filter(7): what expressions begin with.
const FILTER_WORDS: &[&str] = &[
    "ah",
    "arp",
    "broadcast",
    "carp",
    "dst",
    "esp",
    "ether",
    "gateway",
    "geneve",
    "greater",
    "host",
    "icmp",
    "icmp6",
    "ifname",
    "igmp",
    "inbound",
    "ip",
    "ip6",
    "iso",
    "len",
    "less",
    "link",
    "llc",
    "mpls",
    "multicast",
    "net",
    "not",
    "outbound",
    "pim",
    "port",
    "portrange",
    "pppoed",
    "pppoes",
    "proto",
    "rarp",
    "sctp",
    "src",
    "stp",
    "tcp",
    "udp",
    "vlan",
    "vrrp",
    "wlan",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_a_filter_is_known() {
        for word in ["udp", "tcp port 80", "vlan"] {
            assert!(is_filter_word(Path::new(word)), "{word}");
        }
        for word in ["./udp", "udp.pcap", "rec", ""] {
            assert!(!is_filter_word(Path::new(word)), "{word}");
        }
    }
}
