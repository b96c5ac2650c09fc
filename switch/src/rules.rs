//! What a port's settings mean for a frame: its VLAN, who may send and be given it, and in which form.
//!
//! A frame that enters is of one VLAN, and stays in it:
//!
//! | the port is in | without a tag | tagged (0x8100) with VLAN `V` |
//! |---|---|---|
//! | nothing: transparent | VLAN 0, unchanged | VLAN 0, unchanged |
//! | `vlan=A` | VLAN `A` | refused |
//! | `trunk=T` | refused | VLAN `V` if it is in `T`; else refused |
//! | `trunk=T native=A` | VLAN `A` | VLAN `V` if it is in `T`, or is `A`; else refused |
//!
//! A tag of VLAN 0 (a priority) is none. What is tagged inside of that is refused, for it would be tagged once
//! the outer tag is off. An outer tag 0x88a8 is the customer's, and no matter of ours.
//!
//! It leaves through ports of its VLAN in one of two forms, without a tag or with one. **No frame leaves in
//! a form that the same port would take for another VLAN's**: what begins with a tag when ours is off leaves
//! through a trunk with our tag on, and through any other port not at all.

use vnplug_path::bucket::Bucket;

use crate::settings::{Address, Lock, Networks, PortSettings, VlanSet};

/// A frame's VLAN, and how it says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    pub(crate) vlan: u16,
    /// Its outer tag.
    tag: Tag,
    /// It begins with a tag of 0x8100 when ours is off.
    is_nested: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tag {
    None,
    /// Of VLAN 0, with this TCI.
    Priority(u16),
    Full(u16),
}

/// What is done with the tag of a frame that leaves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) enum Edit {
    /// Nothing.
    #[default]
    Keep,
    /// It is taken off.
    Pop,
    /// This one is put on.
    Push(u16),
    /// It becomes this one.
    Set(u16),
}

impl Class {
    /// Of a frame of a transparent port.
    pub(crate) fn transparent(frame: &[u8]) -> Self {
        Self {
            vlan: 0,
            tag: Tag::None,
            is_nested: tci(frame, TYPE).is_some(),
        }
    }

    /// What is done with a frame that leaves without a tag.
    pub(crate) fn plain(self) -> Edit {
        match self.tag {
            Tag::None => Edit::Keep,
            Tag::Priority(_) | Tag::Full(_) => Edit::Pop,
        }
    }

    /// What is done with one that leaves with a tag.
    pub(crate) fn tagged(self) -> Edit {
        match self.tag {
            Tag::None => Edit::Push(self.vlan),
            Tag::Priority(tci) => Edit::Set(tci & !VID | self.vlan),
            Tag::Full(_) => Edit::Keep,
        }
    }
}

/// In which form a port is given a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Plain,
    Tagged,
}

/// A port's settings, for frames.
#[derive(Debug, Default)]
pub(crate) struct Rule {
    untagged: Option<u16>,
    tagged: VlanSet,
    pub(crate) is_isolated: bool,
    pub(crate) is_deaf: bool,
    pub(crate) is_spared: bool,
    is_down: bool,
    /// It is shut for a loop until this second.
    pub(crate) shut_s: Option<u32>,
    pub(crate) lock: Lock,
    /// From which networks its frames may come.
    pub(crate) networks: Networks,
    /// It is locked to the first that is heard.
    takes_first: bool,
    pub(crate) storm: Option<Bucket>,
}

impl Rule {
    pub(crate) fn new(settings: &PortSettings, storm: u32, now_us: u64) -> Self {
        let storm = settings.storm.unwrap_or(storm);
        Self {
            untagged: settings.untagged,
            tagged: settings.tagged.clone(),
            is_isolated: settings.is_isolated,
            is_deaf: settings.is_deaf,
            is_spared: settings.is_spared,
            is_down: settings.is_down,
            shut_s: None,
            lock: settings.lock.clone(),
            networks: settings.networks.clone(),
            takes_first: settings.lock == Lock::First,
            // A tenth of a second's at once.
            storm: (storm > 0)
                .then(|| Bucket::new(storm.into(), u64::from(storm / 10).max(8), now_us)),
        }
    }

    /// Whether a port with it is like one without any.
    pub(crate) fn is_idle(&self) -> bool {
        self.leaves_known() && !self.is_spared && self.storm.is_none()
    }

    /// Whether a port with it is like one without any, for frames whose sender and receiver are known: they are no
    /// part of a storm, and are flooded to nobody.
    pub(crate) fn leaves_known(&self) -> bool {
        self.is_transparent()
            && !(self.is_isolated || self.is_deaf || self.is_shut())
            && self.lock == Lock::No
            && self.networks.is_empty()
    }

    /// Goes on from what the port was until now: a loop, and whom it is locked to.
    pub(crate) fn follow(&mut self, old: &Self) {
        self.shut_s = old.shut_s;
        if self.takes_first && old.takes_first {
            self.lock = old.lock.clone();
        }
    }

    /// Whether the port is in the same VLANs by both.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        (self.untagged, &self.tagged, &self.lock) == (other.untagged, &other.tagged, &other.lock)
    }

    fn is_transparent(&self) -> bool {
        self.untagged.is_none() && self.tagged.is_empty()
    }

    /// Nothing enters or leaves.
    #[inline]
    pub(crate) fn is_shut(&self) -> bool {
        self.is_down || self.shut_s.is_some()
    }

    /// The VLAN of a frame that enters; `None` if it may not.
    #[inline]
    pub(crate) fn classify(&self, frame: &[u8]) -> Option<Class> {
        if self.is_transparent() {
            return Some(Class::transparent(frame));
        }
        let outer = tci(frame, TYPE);
        match outer {
            Some(outer) if outer & VID != 0 => {
                let vlan = outer & VID;
                let is_in = self.tagged.contains(vlan)
                    || (!self.tagged.is_empty() && self.untagged == Some(vlan));
                is_in.then(|| Class {
                    vlan,
                    tag: Tag::Full(outer),
                    is_nested: tci(frame, TYPE + 4).is_some(),
                })
            }
            Some(_) if tci(frame, TYPE + 4).is_some() => None,
            _ => Some(Class {
                vlan: self.untagged?,
                tag: outer.map_or(Tag::None, Tag::Priority),
                is_nested: false,
            }),
        }
    }

    /// In which form the port is given a frame; `None` if it may not have it.
    #[inline]
    pub(crate) fn form(&self, class: Class) -> Option<Form> {
        let Class {
            vlan, is_nested, ..
        } = class;
        if self.is_transparent() {
            return (vlan == 0).then_some(Form::Plain);
        }
        let is_trunk = !self.tagged.is_empty();
        match self.untagged == Some(vlan) {
            true if !is_nested => Some(Form::Plain),
            // VLAN 0 has no tag.
            true => (is_trunk && vlan != 0).then_some(Form::Tagged),
            false => self.tagged.contains(vlan).then_some(Form::Tagged),
        }
    }

    /// Whether the port is in a VLAN, by any frame.
    pub(crate) fn is_in(&self, vlan: u16) -> bool {
        match self.is_transparent() {
            true => vlan == 0,
            false => self.untagged == Some(vlan) || self.tagged.contains(vlan),
        }
    }

    /// The VLAN of frames without a tag.
    pub(crate) fn vlan(&self) -> Option<u16> {
        match self.is_transparent() {
            true => Some(0),
            false => self.untagged,
        }
    }

    /// Whether a station may send through the port; the first may, of a port that is locked to that, and it
    /// is then.
    #[inline]
    pub(crate) fn admits(&mut self, source: Address) -> bool {
        match &mut self.lock {
            Lock::No => true,
            Lock::To(stations) => stations.contains(&source),
            lock @ Lock::First => {
                *lock = Lock::To(vec![source]);
                true
            }
        }
    }
}

/// A port without settings.
pub(crate) static TRANSPARENT: Rule = Rule {
    untagged: None,
    tagged: VlanSet::NONE,
    is_isolated: false,
    is_deaf: false,
    is_spared: false,
    is_down: false,
    shut_s: None,
    lock: Lock::No,
    networks: Networks::ANY,
    takes_first: false,
    storm: None,
};

/// The TCI of a tag of 0x8100 that begins at `at`.
#[inline]
fn tci(frame: &[u8], at: usize) -> Option<u16> {
    // IEEE 802.1Q-2018, 9.4: TPID and TCI, big-endian.
    match frame.get(at..at + 4) {
        Some(&[0x81, 0x00, c0, c1]) => Some(u16::from_be_bytes([c0, c1])),
        _ => None,
    }
}

/// Where the EtherType stands, or the outer tag.
const TYPE: usize = 12;
/// The VLAN in a TCI.
const VID: u16 = 0xfff;

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Rule {
        let mut settings = PortSettings::default();
        settings.apply(text).unwrap();
        Rule::new(&settings, 0, 0)
    }

    fn frame(tags: &[u16]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        for tci in tags {
            frame.extend([0x81, 0]);
            frame.extend(tci.to_be_bytes());
        }
        frame.extend([8, 0, 1, 2, 3, 4]);
        frame
    }

    #[test]
    fn a_frame_is_of_the_vlan_that_the_table_says() {
        for (port, tags, vlan) in [
            ("", &[][..], Some(0)),
            ("", &[7], Some(0)),
            ("vlan=5", &[], Some(5)),
            ("vlan=5", &[5], None),
            ("vlan=5", &[6], None),
            ("vlan=5", &[0xe000], Some(5)),
            ("vlan=5", &[0xe000, 6], None),
            ("trunk=6+7", &[], None),
            ("trunk=6+7", &[6], Some(6)),
            ("trunk=6+7", &[0xe006, 9], Some(6)),
            ("trunk=6+7", &[8], None),
            ("trunk=6+7 native=5", &[], Some(5)),
            ("trunk=6+7 native=5", &[5], Some(5)),
            ("trunk=6+7 native=0", &[], Some(0)),
        ] {
            let class = rule(port).classify(&frame(tags));
            assert_eq!(class.map(|it| it.vlan), vlan, "{port} {tags:?}");
        }
    }

    #[test]
    fn a_frame_leaves_in_the_form_of_the_port() {
        let plain = rule("vlan=5").classify(&frame(&[])).unwrap();
        let urgent = rule("vlan=5").classify(&frame(&[0xe000])).unwrap();
        let tagged = rule("trunk=5").classify(&frame(&[0x2005])).unwrap();
        let nested = rule("trunk=5").classify(&frame(&[5, 6])).unwrap();
        let of_none = rule("").classify(&frame(&[6])).unwrap();
        assert_eq!((plain.plain(), plain.tagged()), (Edit::Keep, Edit::Push(5)));
        assert_eq!(
            (urgent.plain(), urgent.tagged()),
            (Edit::Pop, Edit::Set(0xe005))
        );
        assert_eq!((tagged.plain(), tagged.tagged()), (Edit::Pop, Edit::Keep));
        for (port, class, form) in [
            ("vlan=5", plain, Some(Form::Plain)),
            ("vlan=6", plain, None),
            ("", plain, None),
            ("trunk=5", plain, Some(Form::Tagged)),
            ("trunk=6 native=5", plain, Some(Form::Plain)),
            ("vlan=5", tagged, Some(Form::Plain)),
            ("vlan=5", nested, None),
            ("trunk=5", nested, Some(Form::Tagged)),
            ("trunk=6 native=5", nested, Some(Form::Tagged)),
            ("trunk=6 native=0", of_none, None),
            ("", of_none, Some(Form::Plain)),
        ] {
            assert_eq!(rule(port).form(class), form, "{port} {class:?}");
        }
    }
}
