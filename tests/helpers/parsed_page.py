"""An HTML page as its reader has it: tags, words, and what it would fetch."""

import html.parser


class Page(html.parser.HTMLParser):
  """Counts tags, notes what would be fetched, checks that tags are closed in their order."""

  VOID = ('meta', 'link', 'br', 'use', 'image')

  def __init__(self, text):
    super().__init__()
    self.tags, self.open, self.fetched, self.words, self.unlabelled = [], [], [], [], 0
    self.feed(text)
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.unlabelled += tag == 'svg' and not dict(attrs).get('aria-label')
    self.fetched += [v for k, v in attrs if k in ('src', 'href', 'xlink:href') and not v.startswith(('data:', '#'))]
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.handle_starttag(tag, attrs)
    if tag not in self.VOID:
      self.open.pop()

  def handle_endtag(self, tag):
    if tag not in self.VOID:
      assert self.open.pop() == tag

  def handle_data(self, data):
    self.words.append(data)
