"""Makes the relative links of README.md absolute and adds the repository's address to setup.cfg, for the page on PyPI.

    python docs/absolute_links.py https://github.com/OWNER/NAME v0.2.0

The release workflow runs this before it builds the distributions. The changes are not committed.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
RELATIVE_LINK = re.compile(r'(!?)\[([^]]*)\]\((?!\w+:|#)([^)]+)\)')


def make_links_absolute(markdown: str, address: str, tag: str) -> str:
  """Returns the page with links to the files of this tag; pictures are linked as raw files."""
  return RELATIVE_LINK.sub(
    lambda link: f'{link[1]}[{link[2]}]({address}/{"raw" if link[1] else "blob"}/{tag}/{link[3]})', markdown
  )


def add_project_urls(setup: str, address: str, tag: str) -> str:
  """Returns setup.cfg with the addresses of the source code, documentation, changelog and issues."""
  urls = {
    'Source': address,
    'Documentation': f'{address}/blob/{tag}/docs/index.md',
    'Changelog': f'{address}/blob/{tag}/CHANGELOG.md',
    'Issues': f'{address}/issues',
  }
  lines = ''.join(f'    {name} = {url}\n' for name, url in urls.items())
  extended, count = re.subn(r'^project_urls = ?\n', rf'\g<0>{lines}', setup, flags=re.MULTILINE)
  if count != 1:
    raise ValueError('setup.cfg needs one line `project_urls =`')
  return extended


def main():
  if len(sys.argv) != 3:
    sys.exit(__doc__)
  address, tag = sys.argv[1:]
  readme, setup = ROOT / 'README.md', ROOT / 'setup.cfg'
  readme.write_text(make_links_absolute(readme.read_text(), address, tag))
  setup.write_text(add_project_urls(setup.read_text(), address, tag))


if __name__ == '__main__':
  main()
